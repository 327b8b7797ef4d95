"""Bags that this rank pools itself, of rows that came one by one: in the order, and by the kernel, of the unsharded module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor, KeyedTensor

from lightning_freescale.embeddings.collections import Collection, Table
from lightning_freescale.embeddings.overlap.row_layout import RowLayout, output_names

_SUM, _MEAN = 0, 1
"""Modes of torch.embedding_bag."""


def tables_by_width(collection: Collection) -> list[tuple[Table, ...]]:
    """Return the tables of a collection, those of one width together, and of these first the ones that pool by the sum."""
    widths = dict.fromkeys(table.dim for table in collection.tables)
    by_width = [[table for table in collection.tables if table.dim == width] for width in widths]
    return [tuple(sorted(tables, key=lambda table: table.mean)) for tables in by_width]


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


class BagOutput:
    """Makes of rows what the unsharded EmbeddingBagCollection returns.

    Args:
        collection: the whole collection.
        layouts: of its tables, as :func:`tables_by_width` has them.
    """

    def __init__(self, collection: Collection, layouts: Sequence[RowLayout]) -> None:
        self._weighted, self._layouts = collection.weighted, layouts
        self._names = list(output_names(collection))
        looked_up = [(feature, table) for table in collection.tables for feature in table.features]
        self._widths = [table.dim for _, table in looked_up]
        places = {(feature, table.name): place for place, (feature, table) in enumerate(looked_up)}
        self._places = [
            [places[feature, layout.tables[index].name] for feature, index in layout.features] for layout in layouts
        ]

    def __call__(self, features: KeyedJaggedTensor, rows: Sequence[Tensor]) -> KeyedTensor:
        """Return the pooled rows of a lookup.

        Args:
            features: the ids, with weights if the collection is weighted.
            rows: of every id by layout, each of shape ``[ids, dim]`` in the layout's order of features.
        """
        columns: list[Any] = [None] * len(self._names)
        for layout, places, given in zip(self._layouts, self._places, rows):
            for place, pooled in zip(places, self._pooled(features, layout, given)):
                columns[place] = pooled
        return KeyedTensor(self._names, self._widths, torch.cat(columns, dim=1))

    def _pooled(self, features: KeyedJaggedTensor, layout: RowLayout, rows: Tensor) -> list[Tensor]:
        """Return the pooled rows of each feature of a layout, shape ``[samples, dim]`` each."""
        keys, strides, lengths = features.keys(), features.stride_per_key(), features.lengths()
        weights = features.weights() if self._weighted else None
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
