"""The rows of one batch: what a rank requests from the owners, and what comes in at an owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.embeddings.id_checks import check_id_range
from lightning_freescale.embeddings.overlap.row_layout import RowLayout


@dataclass(frozen=True)
class RowRequest:
    """Rows that this rank requests, in the order in which they travel: by owner, then by slot.

    A slot is a table, or without dedup a feature: what an owner must tell apart.

    Attributes:
        rows: row number on its owner, shape ``[rows]``.
        counts: rows per owner and slot, shape ``[ranks, slots]``, on the host.
        inverse: which of ``rows`` each id of the batch is, shape ``[ids]``, ids in the layout's order of features.
    """

    rows: Tensor
    counts: Tensor
    inverse: Tensor

    @property
    def sizes(self) -> list[int]:
        """Rows per owner."""
        return self.counts.sum(dim=1).tolist()

    @classmethod
    def from_features(cls, features: KeyedJaggedTensor, layout: RowLayout, dedup: bool) -> RowRequest:
        """Return the request for a batch's ids.

        Raises:
            ValueError: an id has no row, the ids are no integers or are weighted, or a feature is missing.
        """
        ids, feature = _checked_ids(features, layout)
        table_of_feature = torch.tensor([table for _, table in layout.features], device=ids.device)
        keys = layout.keys(ids, table_of_feature[feature])
        ranks = len(layout.starts) - 1
        if dedup:
            keys, inverse = torch.unique(keys, return_inverse=True)
            edges = torch.searchsorted(keys, layout.first_keys())
            counts = torch.diff(edges, append=edges.new_tensor([len(keys)])).view(ranks, -1).cpu()
        else:
            owner = torch.bucketize(keys, layout.starts[1:], right=True)
            slot = owner * len(layout.features) + feature
            order = torch.argsort(slot, stable=True)
            keys, inverse = keys[order], torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=order.device)
            counts = torch.bincount(slot, minlength=ranks * len(layout.features)).view(ranks, -1).cpu()
        owned = counts.sum(dim=1).to(keys.device)
        return cls(keys - torch.repeat_interleave(layout.starts[:-1], owned), counts, inverse)

    @classmethod
    def empty(cls, layout: RowLayout, dedup: bool) -> RowRequest:
        """Return a request for no rows."""
        slots = len(layout.tables if dedup else layout.features)
        nothing = layout.starts.new_empty(0)
        return cls(nothing, torch.zeros(len(layout.starts) - 1, slots, dtype=torch.int64), nothing)


@dataclass(frozen=True)
class IncomingRows:
    """Rows that are requested from this rank, in the order in which they came: by requesting rank, then by slot.

    Attributes:
        rows: row numbers here, shape ``[rows]``.
        counts: rows per requesting rank and slot, shape ``[ranks, slots]``, on the host.
    """

    rows: Tensor
    counts: Tensor

    @classmethod
    def from_ranks(cls, rows: Sequence[Tensor], counts: Tensor) -> IncomingRows:
        """Join the rows that each rank has requested."""
        return cls(torch.cat(list(rows)).long(), counts)

    @property
    def sizes(self) -> list[int]:
        """Rows per requesting rank."""
        return self.counts.sum(dim=1).tolist()

    def replaced(self, new: IncomingRows, by: Sequence[bool]) -> IncomingRows:
        """Return these rows, with those of the ranks marked in ``by`` taken from ``new``."""
        pairs = zip(self.rows.split(self.sizes), new.rows.split(new.sizes), by)
        counts = torch.where(torch.tensor(by)[:, None], new.counts, self.counts)
        return IncomingRows.from_ranks([later if changed else earlier for earlier, later, changed in pairs], counts)

    def order_by_slot(self, mask: Tensor) -> Tensor | slice:
        """Return the order of the rows in ``mask`` (bool) by slot, then by requesting rank: TorchRec adds up in that order."""
        ranks, slots = self.counts.shape
        if slots == 1:
            return slice(None)
        slot = torch.arange(slots, dtype=torch.int16).repeat(ranks).repeat_interleave(self.counts.flatten())
        return torch.argsort(slot.to(mask.device)[mask], stable=True)


class RowMembership:
    """Which of this rank's rows are in a set. One array of a byte per row: two batches are compared without sorting.

    Args:
        rows: how many this rank owns.
        device: of the rows.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._marks = torch.zeros(rows, dtype=torch.bool, device=device)

    def isin(self, rows: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return for every row whether it is in ``others``; bool of shape ``[rows]``."""
        for other in others:
            self._marks[other] = True
        found = self._marks[rows]
        for other in others:
            self._marks[other] = False
        return found


@dataclass(frozen=True)
class RowMask:
    """Some of the rows that travel between this rank and each of the others.

    Attributes:
        mask: which, bool of shape ``[rows]``.
        sizes: how many per rank.
    """

    mask: Tensor
    sizes: list[int]

    @classmethod
    def from_mask(cls, mask: Tensor, sizes: Sequence[int]) -> RowMask:
        """Count the chosen rows of every rank; there are ``sizes`` rows per rank in all."""
        totals = np.concatenate([[0], np.cumsum(mask.cpu().numpy())])
        return cls(mask, np.diff(totals[np.cumsum([0, *sizes])]).tolist())

    @classmethod
    def empty(cls, sizes: Sequence[int], device: torch.device) -> RowMask:
        """Choose none of ``sizes`` rows per rank."""
        return cls(torch.zeros(sum(sizes), dtype=torch.bool, device=device), [0] * len(sizes))

    def complement(self, sizes: Sequence[int]) -> RowMask:
        """Choose all of ``sizes`` rows per rank that are not chosen here."""
        return RowMask(~self.mask, [size - chosen for size, chosen in zip(sizes, self.sizes)])


def as_output(features: KeyedJaggedTensor, rows: Tensor, layout: RowLayout, with_ids: bool) -> dict[str, JaggedTensor]:
    """Return what the collection returns: ``rows`` of every id, shape ``[ids, dim]`` in the layout's order, by feature."""
    outputs, start = {}, 0
    for (feature, _), name in zip(layout.features, layout.outputs):
        jagged = features[feature]
        end = start + len(jagged.values())
        weights = jagged.values() if with_ids else None
        outputs[name] = JaggedTensor(values=rows[start:end], lengths=jagged.lengths(), weights=weights)
        start = end
    return outputs


def _checked_ids(features: KeyedJaggedTensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    """Return all ids of the layout's features, and which feature each belongs to."""
    given: Any = features.keys()
    missing = [name for name, _ in layout.features if name not in given]
    if missing:
        raise ValueError(f"the KeyedJaggedTensor has features {list(given)}, without {missing}: pass every feature")
    if features.weights_or_none() is not None:
        raise ValueError(
            f"the KeyedJaggedTensor with features {list(given)} is weighted, but tables {[t.name for t in layout.tables]} of "
            "an EmbeddingCollection have no use for weights: leave weights= out"
        )
    values = [features[name].values() for name, _ in layout.features]
    for (name, table), ids in zip(layout.features, values):
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"feature {name!r} of table {layout.tables[table].name!r} has ids of {ids.dtype}: pass integers")
        check_id_range(name, layout.tables[table], ids)
    ids = torch.cat(values).long()
    sizes = torch.tensor([len(part) for part in values], device=ids.device)
    return ids, torch.repeat_interleave(torch.arange(len(values), device=ids.device), sizes, output_size=len(ids))
