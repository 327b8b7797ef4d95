"""What a rank asks the owners for: the rows of one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.embeddings.id_checks import check_id_range
from lightning_freescale.embeddings.overlap.row_layout import RowLayout


@dataclass(frozen=True)
class RowRequest:
    """Rows in the order in which they travel: by owner, then by slot.

    A slot is a table, or without dedup a feature: what an owner must tell apart.

    Attributes:
        rows: row number on its owner, shape ``[rows]``.
        counts: rows per owner and slot, shape ``[ranks, slots]``, on the host.
        place: which of ``rows`` each id of the batch is, shape ``[ids]``, ids in the layout's order of features.
    """

    rows: Tensor
    counts: Tensor
    place: Tensor

    @property
    def sizes(self) -> list[int]:
        """Rows per owner."""
        return self.counts.sum(dim=1).tolist()

    @classmethod
    def of(cls, features: KeyedJaggedTensor, layout: RowLayout, dedup: bool) -> RowRequest:
        """The request for a batch's ids.

        Raises:
            ValueError: an id has no row, the ids are no integers or are weighted, or a feature is missing.
        """
        ids, feature = _ids(features, layout)
        keys = layout.keys(ids, _table_of(layout, ids.device)[feature])
        ranks = len(layout.starts) - 1
        if dedup:
            keys, place = torch.unique(keys, return_inverse=True)
            edges = torch.searchsorted(keys, layout.edges())
            counts = torch.diff(edges, append=edges.new_tensor([len(keys)])).view(ranks, -1).cpu()
        else:
            owner = torch.bucketize(keys, layout.starts[1:], right=True)
            lot = owner * len(layout.features) + feature
            order = torch.argsort(lot, stable=True)
            keys, place = keys[order], torch.empty_like(order)
            place[order] = torch.arange(len(order), device=order.device)
            counts = torch.bincount(lot, minlength=ranks * len(layout.features)).view(ranks, -1).cpu()
        owned = counts.sum(dim=1).to(keys.device)
        return cls(keys - torch.repeat_interleave(layout.starts[:-1], owned), counts, place)

    @classmethod
    def none(cls, layout: RowLayout, dedup: bool) -> RowRequest:
        """A request for nothing."""
        empty = layout.first.new_empty(0)
        slots = len(layout.tables if dedup else layout.features)
        return cls(empty, torch.zeros(len(layout.starts) - 1, slots, dtype=torch.int64), empty)


def as_output(features: KeyedJaggedTensor, rows: Tensor, layout: RowLayout, with_ids: bool) -> dict[str, JaggedTensor]:
    """What the collection returns: the rows of every id, shape ``[ids, dim]`` in the layout's order, by feature."""
    parts, start = {}, 0
    for (feature, _), name in zip(layout.features, layout.outputs):
        jagged = features[feature]
        end = start + len(jagged.values())
        parts[name] = JaggedTensor(
            values=rows[start:end], lengths=jagged.lengths(), weights=jagged.values() if with_ids else None
        )
        start = end
    return parts


def _ids(features: KeyedJaggedTensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    """All ids of the layout's features, and which feature each belongs to."""
    given: Any = features.keys()
    missing = [name for name, _ in layout.features if name not in given]
    if missing:
        raise ValueError(f"the KeyedJaggedTensor has features {list(given)}, without {missing}: pass every feature")
    if features.weights_or_none() is not None:
        raise ValueError(
            f"the KeyedJaggedTensor with features {list(given)} is weighted, but tables {[t.name for t in layout.tables]} of "
            "an EmbeddingCollection have no use for weights: leave weights= out"
        )
    parts = [features[name].values() for name, _ in layout.features]
    for (name, table), ids in zip(layout.features, parts):
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"feature {name!r} of table {layout.tables[table].name!r} has ids of {ids.dtype}: pass integers")
        check_id_range(name, layout.tables[table], ids)
    ids = torch.cat(parts).long()
    sizes = torch.tensor([len(part) for part in parts], device=ids.device)
    return ids, torch.repeat_interleave(torch.arange(len(parts), device=ids.device), sizes, output_size=len(ids))


def _table_of(layout: RowLayout, device: torch.device) -> Tensor:
    return torch.tensor([table for _, table in layout.features], device=device)
