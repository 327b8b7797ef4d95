"""The forward of a sharded module under the overlap engine, with bitwise the results of the unsharded module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.overlap.catalogue_table import CatalogueTable, RankedSamples, ranks_over_shards
from lightning_freescale.embeddings.overlap.collection import OverlappedCollection
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.shards import ShardedTables, refuse_whole_use

_SUM, _MEAN = 0, 1
"""Modes of ``torch.embedding_bag``."""


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the ids without weights. Weights stay on this rank, and may differ from the expected ones."""
    if features.weights_or_none() is None:
        return features
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


class _Output:
    """Converts rows to the output of a collection.

    The output has one result per feature of a table. If a plan splits the columns of the table, a result consists of parts.
    """

    def __init__(self, collection: Collection, layouts: Sequence[RowLayout]) -> None:
        self._collection, self._layouts = collection, layouts
        looked_up = [(feature, table) for table in collection.tables for feature in table.features]
        self._features = [feature for feature, _ in looked_up]
        # names as in TorchRec
        names = [each if self._features.count(each) == 1 else f"{each}@{table.name}" for each, table in looked_up]
        self._names, self._widths = names, [table.dim for _, table in looked_up]
        results = {(feature, table.name): place for place, (feature, table) in enumerate(looked_up)}
        given = [(feature, layout.tables[index]) for layout in layouts for feature, index in layout.features]
        keys = [(results[feature, table.name], table.first_column) for feature, table in given]
        self._order = sorted(range(len(keys)), key=keys.__getitem__)
        self._part_counts = [sum(result == place for result, _ in keys) for place in range(len(looked_up))]

    def _parts(self, given: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the parts by layout and feature, in the order of results and of the columns within a result."""
        parts = [each for of_layout in given for each in of_layout]
        return [parts[place] for place in self._order]


class SequenceOutput(_Output):
    """Returns the output of an unsharded EmbeddingCollection."""

    def __call__(self, features: KeyedJaggedTensor, rows: Sequence[Tensor]) -> dict[str, JaggedTensor]:
        """Return the rows of a lookup by feature.

        ``rows`` has the rows of every id by layout, each of shape ``[ids, dim]`` in the layout's order of features.
        """
        # a single feature needs no offsets, for which the host would wait on CUDA
        jagged: dict[str, Any] = {
            feature: features if len(features.keys()) == 1 else features[feature] for feature in self._features
        }
        ids = {feature: each.values().numel() for feature, each in jagged.items()}
        given = []
        for layout, each in zip(self._layouts, rows):
            counts = [ids[feature] for feature, _ in layout.features]
            starts = [0, *accumulate(counts)]
            # the caller may change rows in place: torch forbids that for results of split, and copies if it is a view
            given.append([each.narrow(0, *span) for span in zip(starts, counts)] if len(counts) > 1 else [each])
        columns, outputs = iter(self._parts(given)), {}
        for name, feature, count in zip(self._names, self._features, self._part_counts):
            values = next(columns) if count == 1 else torch.cat([next(columns) for _ in range(count)], dim=1)
            weights = jagged[feature].values() if self._collection.need_indices else None
            outputs[name] = JaggedTensor(values=values, lengths=jagged[feature].lengths(), weights=weights)
        return outputs


class BagOutput(_Output):
    """Returns the output of an unsharded EmbeddingBagCollection."""

    def __call__(self, features: KeyedJaggedTensor, rows: Sequence[Tensor]) -> KeyedTensor:
        """Return the pooled rows of a lookup.

        ``features`` has weights if the collection is weighted. ``rows`` is as for :class:`SequenceOutput`.
        """
        pooled = [self._pooled(features, layout, given) for layout, given in zip(self._layouts, rows)]
        return KeyedTensor(self._names, self._widths, torch.cat(self._parts(pooled), dim=1))

    def _pooled(self, features: KeyedJaggedTensor, layout: RowLayout, rows: Tensor) -> list[Tensor]:
        """Return the pooled rows of each feature of a layout, shape ``[samples, dim]`` each."""
        keys, strides, lengths = features.keys(), features.stride_per_key(), features.lengths()
        weights = features.weights() if self._collection.weighted else None
        order = [keys.index(feature) for feature, _ in layout.features]
        if order != [*range(len(keys))]:
            lengths = _in_order(lengths, strides, order)
            weights = None if weights is None else _in_order(weights, features.length_per_key(), order)
        bags = [strides[index] for index in order]
        sums = sum(not layout.tables[table].mean for _, table in layout.features)  # tables that pool by the sum come first
        if 0 < sums < len(order):
            ids, first = features.length_per_key(), sum(bags[:sums])  # the host may wait here on CUDA, as for a split
            summed = sum(ids[index] for index in order[:sums])
            pooled = [
                *_Pool.apply(rows[:summed], None, lengths[:first], _SUM).split(bags[:sums]),
                *_Pool.apply(rows[summed:], None, lengths[first:], _MEAN).split(bags[sums:]),
            ]
        else:
            pooled = [*_Pool.apply(rows, weights, lengths, _SUM if sums else _MEAN).split(bags)]
        inverse = features.inverse_indices_or_none()
        if inverse is None:
            return pooled
        names, samples = inverse  # samples may share bags
        return [each.index_select(0, samples[names.index(feature)]) for each, (feature, _) in zip(pooled, layout.features)]


def _in_order(values: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    parts = values.split(sizes)
    return torch.cat([parts[index] for index in order])


class _Pool(torch.autograd.Function):
    # Every row belongs to one bag, so the gradient of a row is that of its bag. The backward of torch.embedding_bag would sort
    # the rows first, to sum the gradients of a row over bags.

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, lengths: Tensor, mode: int) -> Tensor:
        ctx.mode, ctx.ids = mode, len(rows)
        ctx.save_for_backward(lengths, *(() if weights is None else (weights, rows)))
        places = torch.arange(len(rows), device=rows.device)
        first = torch.cumsum(lengths, dim=0, dtype=torch.int64) - lengths
        return torch.embedding_bag(rows, places, first, mode=mode, per_sample_weights=weights)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        lengths, *weighted = ctx.saved_tensors
        if ctx.mode == _MEAN:
            gradient = gradient * lengths.clamp(min=1).to(gradient.dtype).reciprocal()[:, None]
        of_rows = torch.repeat_interleave(gradient, lengths, dim=0, output_size=ctx.ids)
        if not weighted:
            return of_rows, None, None, None
        weights, rows = weighted
        of_weights = (of_rows * rows).sum(dim=1) if ctx.needs_input_grad[1] else None
        return of_rows * weights[:, None], of_weights, None, None


class Evaluation:
    """Makes lookups outside of steps. Ranks may look up different modules, and make different numbers of lookups.

    A lookup is one round of all ranks. Its first message, sent by the first collection, tells which module each rank looks up,
    or by which table it ranks samples. Then the collections of these modules exchange rows, and the ranks exchange the samples.
    A rank without further lookups joins the rounds of the others in :meth:`serve`.
    """

    def __init__(self, modules: Mapping[str, ModuleForward]) -> None:
        self.modules = modules  # by path, in the same order on all ranks
        self.tables: list[CatalogueTable] = []  # that rank samples, in the same order on all ranks

    def rows(self, path: str, ids: KeyedJaggedTensor) -> list[Tensor]:
        """Return the rows of a lookup of the module at ``path`` by part, each of shape ``[ids, dim]``."""
        return self._round(1 + list(self.modules).index(path), ids)[1]

    def ranks(
        self, table: CatalogueTable, hidden: Tensor, targets: Tensor, seen: Tensor | None, items: range | None = None
    ) -> Tensor | None:
        """Return how many items of a table come before each target; None in a step. See :class:`RankedSamples`."""
        if table.in_step:
            return None
        seen = targets.new_empty(len(targets), 0) if seen is None else seen
        samples = RankedSamples(hidden, targets, seen, range(table.table.rows) if items is None else items)
        return self._round(1 + len(self.modules) + self.tables.index(table), samples=samples)[1][0]

    def serve(self) -> None:
        """Serve the lookups of other ranks until every rank has called this method."""
        while self.modules and self._round(0)[0]:
            pass

    def _round(
        self, number: int, ids: KeyedJaggedTensor | None = None, samples: RankedSamples | None = None
    ) -> tuple[set[int], list[Tensor]]:
        """Look up the module or rank samples by the table with a number; serve other ranks for number 0.

        Return the numbers of all ranks, and the rows, or the ranks of the samples.
        """
        modules = [module.parts for module in self.modules.values()]
        collections = [part for parts in modules for part in parts]
        for each in collections:
            each.drain()
        first = collections[0]
        mine = modules[number - 1] if ids is not None else []
        by_rank, found = first.evaluated(first.submit_evaluation(number, ids if first in mine else None))
        rows, numbers = {first: found}, set(by_rank) - {0}
        looked_up = [each - 1 for each in sorted(numbers) if each <= len(modules)]
        others = [each for module in looked_up for each in modules[module] if each is not first]
        # submit all before waiting for any
        jobs = [(each, each.submit_evaluation(number, ids if each in mine else None)) for each in others]
        rows |= {each: each.evaluated(job)[1] for each, job in jobs}
        results = [rows[each] for each in mine]
        for other in sorted(numbers)[len(looked_up) :]:
            table = self.tables[other - len(modules) - 1]
            asks = samples is not None and other == number
            ranks = ranks_over_shards(table, samples if samples is not None and asks else RankedSamples.none(table))
            results += [ranks] if asks else []
        return numbers, results


class ModuleForward:
    """Replaces the forward of TorchRec's module until :meth:`close`; the rest of the module is unchanged."""

    def __init__(
        self,
        collection: Collection,
        module: Any,
        parts: Sequence[OverlappedCollection],
        evaluation: Evaluation,
        tables: ShardedTables,
    ) -> None:
        self.collection, self.parts = collection, parts
        self._module = module
        output = BagOutput if collection.pooled else SequenceOutput
        self._output = output(collection, [part.local.layout for part in parts])
        self._evaluation = evaluation
        module.forward = self.forward
        self._catalogues: dict[str, CatalogueTable] = {}
        features = list(dict.fromkeys(feature for table in collection.tables for feature in table.features))
        for table in collection.tables:
            number = next(i for i, part in enumerate(parts) if table.name in {each.name for each in part.local.layout.tables})
            self._catalogues[table.key] = CatalogueTable(table, features, parts[number], self.rows, number, tables)
        for key, weight in self._weights():
            catalogue = weight.freescale_catalogue = self._catalogues[key]
            if catalogue.has_whole_rows:
                evaluation.tables.append(catalogue)
                weight.freescale_ranks = partial(evaluation.ranks, catalogue)
        self._state_dict_hook = module.register_state_dict_pre_hook(self._drain)
        # the engine raises errors of ids on every rank, and makes one update of several lookups
        module.freescale_sharding.checks.enabled = False

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self._output(features, self.rows(without_weights(features)))

    def rows(self, ids: KeyedJaggedTensor) -> list[Tensor]:
        """Return the rows of a lookup by part, each of shape ``[ids, dim]`` in the layout's order of features."""
        in_step = self.parts[0].step.open
        if not in_step:
            rows = self._evaluation.rows(self.collection.path, ids)
            if torch.is_grad_enabled():
                rows = [_refuse_gradient(each, self.collection.path) for each in rows]
        elif not torch.is_grad_enabled():
            rows = [part.rows_without_gradient(ids) for part in self.parts]
        elif torch._C._current_graph_task_id() != -1:  # during backward: activation checkpointing recomputes a module
            rows = [part.rows_again(ids) for part in self.parts]
        else:
            noted = [part.note(ids) for part in self.parts]  # before any part waits: other ranks wait for their announcement
            rows = [part.rows(lookup) for part, lookup in zip(self.parts, noted)]
        return rows

    def _drain(self, *_: Any) -> None:
        for part in self.parts:
            part.drain()

    def forget_copies(self) -> None:
        for catalogue in self._catalogues.values():
            catalogue.copied = None

    def _weights(self) -> list[tuple[str, Any]]:
        held = self.collection.parameters(self._module)
        return [(key, held[key]) for key in self._catalogues]

    def close(self, farewell: bool) -> None:
        """Restore TorchRec's forward, and end the exchanges."""
        del self._module.forward
        for key, weight in self._weights():
            weight.freescale_catalogue = partial(refuse_whole_use, key)
            weight.freescale_ranks = None
        self._state_dict_hook.remove()
        self._module.freescale_sharding.checks.enabled = True
        for part in self.parts:
            part.close(farewell)


def _refuse_gradient(rows: Tensor, path: str) -> Tensor:
    """Return rows that were looked up outside of a step as part of a graph whose backward raises an error."""

    def refuse(gradient: Tensor) -> NoReturn:
        raise ValueError(
            f"Embedding collection {path!r}: backward through rows that were looked up outside of a training step would not "
            "update the tables. Look them up in training_step, or under torch.no_grad() if the tables need no gradient."
        )

    rows.requires_grad_().register_hook(refuse)
    return rows.clone()
