"""The rows that this rank owns: reading them, and updating them with the kernels of TorchRec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.sparse_adam import update_rows


@dataclass(frozen=True)
class LocalTable:
    """A table's rows on this rank.

    Attributes:
        index: the table's place in the layout.
        base: number of its first row here.
        weight: live view, shape ``[rows, dim]``.
    """

    index: int
    base: int
    weight: Tensor


class TableKernel:
    """Tables that one FBGEMM kernel updates together.

    Args:
        module: FBGEMM's module.
        tables: its tables in the order of its features, once per feature.
        held: its tables by their place in the layout.
        group: the parameter group that sets its learning rate, if one does.
    """

    def __init__(self, module: Any, tables: Sequence[int], held: dict[int, LocalTable], group: int | None) -> None:
        self.module, self.held, self.group = module, held, group
        self._places = {index: tables.index(index) for index in tables}
        self._features = len(tables)

    def update(self, rows: dict[int, tuple[Tensor, Tensor]], rate: float | None, step: int) -> None:
        """One update of all rows given, by table; gradients of a row that is there several times are added up in order."""
        given = sorted((self._places[index], index) for index in rows)
        counts = torch.zeros(self._features + 1, dtype=torch.int64)
        for place, index in given:
            counts[place + 1] = len(rows[index][0])
        ids = torch.cat([rows[index][0] - self.held[index].base for _, index in given])
        gradients = torch.cat([rows[index][1] for _, index in given])
        self.prepare(rate, step)
        with torch.enable_grad():
            self.module(indices=ids, offsets=counts.cumsum(0).to(ids.device)).backward(gradients)

    def prepare(self, rate: float | None, step: int) -> None:
        """Set learning rate and number of updates done."""
        if rate is not None:
            self.module.set_learning_rate(rate)
        self.module.iter.fill_(step)


class AdamKernel(TableKernel):
    """Tables that are updated by Adam on CPU; FBGEMM's module only holds them.

    Args:
        states: of each table, by its place in the layout.
        arguments: of the optimizer, in FBGEMM's words.
        others: as for :class:`TableKernel`.
    """

    def __init__(self, states: dict[int, dict[str, Tensor]], arguments: Mapping[str, Any], *others: Any) -> None:
        super().__init__(*others)
        self._states, self._arguments = states, arguments

    def update(self, rows: dict[int, tuple[Tensor, Tensor]], rate: float | None, step: int) -> None:
        """One update of all rows given, by table."""
        for index, (given, gradients) in rows.items():
            merged, place = torch.unique(given - self.held[index].base, return_inverse=True)
            sums = gradients.new_zeros(len(merged), gradients.shape[1]).index_add_(0, place, gradients)
            rate = self._arguments["lr"] if rate is None else rate
            update_rows(self.held[index].weight, self._states[index], merged, sums, self._arguments, rate, step)


class LocalRows:
    """This rank's rows of a collection, by their number in the layout.

    Args:
        layout: of the collection.
        rank: this rank.
        kernels: what updates them.
        dim: width of a row.

    Attributes:
        count: rows owned.
    """

    def __init__(self, layout: RowLayout, rank: int, kernels: Sequence[Any], dim: int) -> None:
        self.kernels, self.dim = list(kernels), dim
        self._held = [held for kernel in self.kernels for held in kernel.held.values()]
        self._edges = layout.base[rank].contiguous()
        self.count = layout.rows_of(rank)

    def prepare(self, rates: Sequence[float | None], step: int) -> None:
        """Before TorchRec's own backward updates rows: what :meth:`update` would be given."""
        for kernel, rate in zip(self.kernels, rates):
            kernel.prepare(rate, step)

    @torch.no_grad()
    def read(self, rows: Tensor) -> Tensor:
        """Their current values, float32 of shape ``[rows, dim]``."""
        if len(self._held) == 1:
            return self._held[0].weight.index_select(0, rows).float()
        values = torch.empty(len(rows), self.dim, device=rows.device)
        table = self._table_of(rows)
        for held in self._held:
            here = (table == held.index).nonzero().squeeze(1)
            if len(here):
                values[here] = held.weight.index_select(0, rows[here] - held.base).float()
        return values

    def update(self, rows: Tensor, gradients: Tensor, rates: Sequence[float | None], step: int) -> None:
        """One optimizer step for these rows.

        Args:
            rows: shape ``[rows]``; a row that is there several times gets the sum, added up in this order.
            gradients: shape ``[rows, dim]``.
            rates: learning rate of each kernel; None keeps the kernel's own.
            step: updates done before this one.
        """
        if not len(rows):
            return
        found = self._by_table(rows, gradients)
        for kernel, rate in zip(self.kernels, rates):
            parts = {index: found[index] for index in kernel.held if index in found}
            if parts:
                kernel.update(parts, rate, step)

    def written(self) -> list[int]:
        """Where somebody has written the tables: torch's counts of writes, which the kernels' own updates do not raise."""
        return [held.weight._version for held in self._held]

    def _by_table(self, rows: Tensor, gradients: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """The tables that have any of ``rows``, each with its part."""
        if len(self._held) == 1:
            return {self._held[0].index: (rows, gradients)}
        table = self._table_of(rows)
        masks = {held.index: table == held.index for held in self._held}
        return {index: (rows[here], gradients[here]) for index, here in masks.items() if here.any()}

    def _table_of(self, rows: Tensor) -> Tensor:
        # tables without rows here share their first number with the next one: the last of them holds the row
        return torch.bucketize(rows, self._edges, right=True) - 1
