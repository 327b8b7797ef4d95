"""The rows of one batch: those that a rank requests from the owners, and those that other ranks request from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.id_checks import check_id_ranges
from lightning_freescale.embeddings.overlap.row_layout import RowLayout


@dataclass(frozen=True)
class RowRequest:
    """Rows that this rank requests, in the order in which they are sent: by owner, then by number.

    With dedup each row occurs once. Without dedup it occurs once per id, by owner, feature and position in the batch. All
    indices have 32 bits, because they are held until backward.
    """

    rows: Tensor  # row number on its owner, shape [rows]
    sizes: list[int]  # rows per rank that receives the request: an owner, or a proxy
    ids: list[int]  # ids of the batch per owner
    of_lookup: list[int]  # ids of each lookup
    # Numbers on the host for each rank that receives the request, shape [ranks, slots]. Without dedup and with several
    # features: its rows per feature. To a proxy: the rows per node of the owners. Otherwise empty.
    slots: Tensor
    order: Tensor  # indices of the ids of the batch, sorted by their row, shape [ids]
    first: Tensor  # index into order of the first id of each row, shape [rows]
    inverse: Tensor  # index into rows for each id, shape [ids], lookup by lookup, each in the layout's order of features
    bags: Sequence[int] = ()  # bags or sequences of each feature in all lookups, in the layout's order of features

    @classmethod
    def from_lookups(cls, lookups: Sequence[KeyedJaggedTensor], layout: RowLayout, dedup: bool) -> RowRequest:
        """Return the request for the ids of all lookups of a batch. Raise a ValueError for wrong ids or a missing feature."""
        if not lookups:
            return cls.empty(layout, dedup)
        ids = [_checked_ids(features, layout) for features in lookups]
        of_lookup = [sum(part.numel() for part in parts) for parts in ids]
        strides = [dict(zip(features.keys(), features.stride_per_key())) for features in lookups]
        bags = [sum(each[name] for each in strides) for name, _ in layout.features]
        parts = [(index, part) for parts in ids for index, part in enumerate(parts)]
        of_tables = groupby(parts, key=lambda part: layout.features[part[0]][1])  # one call for all features of a table
        keys = joined([layout.keys(table, joined([ids for _, ids in run])) for table, run in of_tables])
        if dedup:
            return replace(cls.of_keys(keys, layout), of_lookup=of_lookup, bags=bags)
        lengths, features = keys.new_tensor([part.numel() for _, part in parts]), len(layout.features)
        feature = torch.repeat_interleave(keys.new_tensor([index for index, _ in parts]), lengths, output_size=keys.numel())
        slot = layout.owners(keys) * features + feature
        order = torch.argsort(slot, stable=True)
        first = torch.arange(keys.numel(), device=keys.device)
        counts = torch.bincount(slot, minlength=layout.ranks * features).view(layout.ranks, -1)
        sizes = counts.sum(dim=1).tolist()  # on CUDA the host waits here
        slots = counts.cpu() if features > 1 else _no_slots(layout, dedup)
        rows = _on_owners(keys[order], sizes, layout)
        return cls(rows, sizes, sizes, of_lookup, slots, order.int(), first.int(), _inverse(order, first), bags)

    @classmethod
    def empty(cls, layout: RowLayout, dedup: bool) -> RowRequest:
        nothing, none = torch.empty(0, dtype=torch.int32, device=layout.device), [0] * layout.ranks
        return cls(nothing, none, none, [], _no_slots(layout, dedup), nothing, nothing, nothing)

    @classmethod
    def of_keys(cls, keys: Tensor, layout: RowLayout) -> RowRequest:
        """Return the request for the rows of ``keys``, see :func:`keys_of`; each row once. The keys are its ids."""
        ordered, order = _sorted(keys, layout.key_bits)
        new = torch.ones_like(ordered, dtype=torch.bool)
        new[1:] = ordered[1:] != ordered[:-1]
        first = new.nonzero().squeeze(1)
        ordered, places = ordered[first], new.cumsum(0) - 1
        edges = torch.searchsorted(ordered, layout.starts)
        of_ids = torch.diff(F.pad(first, (0, 1), value=keys.numel())[edges])
        sizes, ids = torch.stack([torch.diff(edges), of_ids]).tolist()  # on CUDA the host waits here
        rows = _on_owners(ordered, sizes, layout)
        return cls(rows, sizes, ids, [], _no_slots(layout, True), order.int(), first.int(), _inverse(order, places))

    def sum_per_row(self, gradient: Tensor) -> Tensor:
        """Sum the gradients of the ids of each row, in the order of the batch: ``[ids, dim]`` to ``[rows, dim]``."""
        if self.first.numel() == self.order.numel():
            return gradient.index_select(0, self.order)
        return torch.embedding_bag(gradient, self.order, self.first)[0]


@dataclass(frozen=True)
class IncomingRows:
    """Rows that other ranks request from this rank, in the order of arrival: by requesting rank."""

    rows: Tensor  # row numbers here, int64 of shape [rows]
    sizes: list[int]  # rows per requesting rank
    slots: Tensor  # RowRequest.slots per requesting rank
    forwarded: Forwarded | None = None  # how the rows of this rank were requested; None if from the owners only

    def replaced(self, new: IncomingRows, by: Sequence[bool]) -> IncomingRows:
        """Return these rows, with those of the ranks marked in ``by`` replaced by ``new``; whole nodes with hot rows."""
        forwarded = self.forwarded
        if new.forwarded is not None:
            each = len(new.forwarded.asked.sizes)
            nodes = [any(by[first : first + each]) for first in range(0, len(by), each)]
            by = [changed for changed in nodes for _ in range(each)]
            forwarded = new.forwarded if nodes[new.forwarded.node] else forwarded
        pairs = zip(self.rows.split(self.sizes), new.rows.split(new.sizes), by)
        parts = [later if changed else earlier for earlier, later, changed in pairs]
        slots = torch.where(torch.tensor(by)[:, None], new.slots, self.slots)
        return IncomingRows(torch.cat(parts), [part.numel() for part in parts], slots, forwarded)

    def order_by_slot(self, chosen: Tensor) -> Tensor | None:
        """Return the order by slot and requesting rank, in which TorchRec adds gradients; None if it is theirs already."""
        ranks, slots = self.slots.shape
        if slots < 2:
            return None
        slot = torch.arange(slots, dtype=torch.int16).repeat(ranks).repeat_interleave(self.slots.flatten())
        return torch.argsort(slot.to(chosen.device)[chosen], stable=True)


@dataclass(frozen=True)
class RowSubset:
    """Some of the rows that are sent between this rank and each other rank."""

    index: Tensor  # indices of these rows, shape [chosen]
    sizes: list[int]  # number of chosen rows per rank

    @classmethod
    def all_of(cls, sizes: Sequence[int], device: torch.device) -> RowSubset:
        return cls(torch.arange(sum(sizes), device=device), list(sizes))

    @classmethod
    def split(cls, mask: Tensor, sizes: Sequence[int]) -> tuple[RowSubset, RowSubset]:
        """Return the rows marked in ``mask`` (bool), and all others; ``sizes`` counts all rows per rank."""
        index = mask.nonzero().squeeze(1)
        edges = torch.searchsorted(index, torch.tensor([*accumulate(sizes)], device=mask.device)).tolist()
        chosen = [end - start for start, end in zip([0, *edges], edges)]
        others = [size - count for size, count in zip(sizes, chosen)]
        return cls(index, chosen), cls((~mask).nonzero().squeeze(1), others)


@dataclass(frozen=True)
class Forwarded:
    """The rows of a batch that this rank requests with hot rows: its own cold rows, and rows for the ranks of its node."""

    node: int  # index of the node of this rank
    hot: RowSubset  # rows of this rank that it requests from the proxies of its node
    cold: Tensor  # indices of all other rows of this rank
    asked: IncomingRows  # rows that the ranks of the node request from this rank as a proxy; the slots are rows per node
    request: RowRequest  # each cold and each asked row once; these are its ids, cold ones first

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """The indices into the rows of ``request`` for each cold and for each asked row."""
        return self.request.inverse[: len(self.cold)], self.request.inverse[len(self.cold) :]


def keys_of(rows: Tensor, sizes: Sequence[int], layout: RowLayout) -> Tensor:
    """Return the key of each row, see :meth:`RowLayout.keys`, of ``sizes`` rows per owner."""
    return rows + _first_keys(sizes, rows.numel(), layout)


def _first_keys(sizes: Sequence[int], rows: int, layout: RowLayout) -> Tensor:
    return torch.repeat_interleave(layout.starts[:-1], torch.tensor(sizes, device=layout.device), output_size=rows)


def _on_owners(keys: Tensor, sizes: Sequence[int], layout: RowLayout) -> Tensor:
    return (keys - _first_keys(sizes, keys.numel(), layout)).int()


def _inverse(order: Tensor, places: Tensor) -> Tensor:
    inverse = torch.empty_like(order, dtype=torch.int32)
    inverse[order] = places.int()
    return inverse


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _no_slots(layout: RowLayout, dedup: bool) -> Tensor:
    slots = 0 if dedup or len(layout.features) == 1 else len(layout.features)
    return torch.zeros(layout.ranks, slots, dtype=torch.int64)


def _sorted(keys: Tensor, key_bits: int) -> tuple[Tensor, Tensor]:
    place_bits = keys.numel().bit_length()
    if keys.is_cuda or key_bits + place_bits > 63:
        return torch.sort(keys, stable=True)
    # key and index in one number: numpy sorts plain integers several times as fast as torch sorts pairs
    packed = torch.from_numpy(np.sort(((keys << place_bits) | torch.arange(keys.numel())).numpy()))
    return packed >> place_bits, packed & ((1 << place_bits) - 1)


def _checked_ids(features: KeyedJaggedTensor, layout: RowLayout) -> list[Tensor]:
    given: Any = features.keys()
    missing = [name for name, _ in layout.features if name not in given]
    if missing:
        raise ValueError(f"The KeyedJaggedTensor has the features {list(given)}, without {missing}. Pass every feature.")
    parts = dict(zip(given, features.values().split(features.length_per_key())))  # features[name] makes ten times the calls
    values = [parts[name] for name, _ in layout.features]
    for (name, table), ids in zip(layout.features, values):
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"Feature {name!r} of table {layout.tables[table].name!r} has ids of {ids.dtype}. Pass integers.")
    check_id_ranges((name, layout.tables[table], ids) for (name, table), ids in zip(layout.features, values))
    return [ids.long() for ids in values]
