"""What a sharded module returns, made of the rows of its ids: the results of the unsharded module, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.overlap.row_layout import RowLayout

_SUM, _MEAN = 0, 1
"""Modes of torch.embedding_bag."""


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the ids alone: their weights stay on this rank, and may be others than were expected."""
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
    """The results of a collection, made of rows.

    A result is what a table has for one of its features. Where a plan splits the columns of the table, it consists of parts.

    Args:
        collection: the whole collection.
        layouts: of its tables, as :func:`.row_layout.parts_by_width` returns them.
    """

    def __init__(self, collection: Collection, layouts: Sequence[RowLayout]) -> None:
        self._collection, self._layouts = collection, layouts
        looked_up = [(feature, table) for table in collection.tables for feature in table.features]
        self._features = [feature for feature, _ in looked_up]
        # as TorchRec names them
        names = [each if self._features.count(each) == 1 else f"{each}@{table.name}" for each, table in looked_up]
        self._names, self._widths = names, [table.dim for _, table in looked_up]
        results = {(feature, table.name): place for place, (feature, table) in enumerate(looked_up)}
        given = [(feature, layout.tables[index]) for layout in layouts for feature, index in layout.features]
        keys = [(results[feature, table.name], table.first_column) for feature, table in given]
        self._order = sorted(range(len(keys)), key=keys.__getitem__)
        self._part_counts = [sum(result == place for result, _ in keys) for place in range(len(looked_up))]

    def _parts(self, given: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return what each layout has for each of its features in the order of results, and of the columns in a result."""
        parts = [each for of_layout in given for each in of_layout]
        return [parts[place] for place in self._order]


class SequenceOutput(_Output):
    """Makes of rows what the unsharded EmbeddingCollection returns."""

    def __call__(self, features: KeyedJaggedTensor, rows: Sequence[Tensor]) -> dict[str, JaggedTensor]:
        """Return the rows of a lookup by feature.

        Args:
            features: the ids.
            rows: of every id by layout, each of shape ``[ids, dim]`` in the layout's order of features.
        """
        # a feature that is alone needs no offsets: on CUDA the host would wait for them
        jagged: dict[str, Any] = {
            feature: features if len(features.keys()) == 1 else features[feature] for feature in self._features
        }
        ids = {feature: each.values().numel() for feature, each in jagged.items()}
        given = []
        for layout, each in zip(self._layouts, rows):
            counts = [ids[feature] for feature, _ in layout.features]
            starts = [0, *accumulate(counts)]
            # the caller may change rows in place: torch forbids that for what split returns, and copies if it is a view
            given.append([each.narrow(0, *span) for span in zip(starts, counts)] if len(counts) > 1 else [each])
        columns, outputs = iter(self._parts(given)), {}
        for name, feature, count in zip(self._names, self._features, self._part_counts):
            values = next(columns) if count == 1 else torch.cat([next(columns) for _ in range(count)], dim=1)
            weights = jagged[feature].values() if self._collection.need_indices else None
            outputs[name] = JaggedTensor(values=values, lengths=jagged[feature].lengths(), weights=weights)
        return outputs


class BagOutput(_Output):
    """Makes of rows what the unsharded EmbeddingBagCollection returns."""

    def __call__(self, features: KeyedJaggedTensor, rows: Sequence[Tensor]) -> KeyedTensor:
        """Return the pooled rows of a lookup.

        Args:
            features: the ids, with weights if the collection is weighted.
            rows: of every id by layout, each of shape ``[ids, dim]`` in the layout's order of features.
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
        sums = sum(not layout.tables[table].mean for _, table in layout.features)  # these come first
        if 0 < sums < len(order):
            ids, first = features.length_per_key(), sum(bags[:sums])  # on CUDA the host may wait here, as for a split
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
        names, samples = inverse  # bags that samples share are there once
        return [each.index_select(0, samples[names.index(feature)]) for each, (feature, _) in zip(pooled, layout.features)]


def _in_order(values: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    parts = values.split(sizes)
    return torch.cat([parts[index] for index in order])


class _Pool(torch.autograd.Function):
    # Every row belongs to one bag, so that the gradient of a row is that of its bag; the backward of torch's own would sort
    # the rows first, to add up what several bags have of one.

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
