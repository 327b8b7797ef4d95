"""The place of each target among all items, by their scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_CHUNK_SCORES = 2**24
"""Scores that exist at once: 64 MiB in float32."""


@torch.no_grad()
def target_ranks(scores: Tensor, targets: Tensor, seen: Tensor | None = None) -> Tensor:
    """Return how many items come before each target: 0 for the best place.

    Items whose score equals the target's come before it, and so do those without a number (NaN), so that neither a constant
    model nor one that has diverged looks good.

    Args:
        scores: shape ``[samples, items]``.
        targets: the item that is asked for, int64 of shape ``[samples]``.
        seen: items that do not compete, int64 of shape ``[samples, any]``; negative numbers fill rows up. A target competes
            although it is among them.

    Returns:
        int64 of shape ``[samples]``.

    Raises:
        ValueError: a shape or dtype does not fit.

    Examples:
        >>> target_ranks(torch.tensor([[0.1, 0.5, 0.3], [0.2, 0.2, 0.1]]), torch.tensor([2, 0]))
        tensor([1, 1])
    """
    _refuse(scores.shape, targets, seen)
    return _ranks(scores, targets, seen)


@torch.no_grad()
def catalogue_ranks(
    hidden: Tensor, table: Tensor | nn.Module, targets: Tensor, seen: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return :func:`target_ranks` of the scores ``hidden @ weight.T + bias``, which are computed for some samples at a time.

    Of a table that strategy ``"freescale"`` shards, outside of training steps and without ``bias``, each rank scores the
    samples of all ranks against its own rows, in float64. Ranks may make different numbers of calls. With ``bias``, or in a
    training step, a copy of the whole table is gathered on the rank.

    Args:
        hidden: a state for each sample, shape ``[samples, dim]``.
        table: a row for each item: the weight of shape ``[items, dim]``, or a module that has it as its ``weight``.
        targets: as for :func:`target_ranks`.
        seen: as for :func:`target_ranks`.
        bias: shape ``[items]``.

    Returns:
        int64 of shape ``[samples]``.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    weight: Any = table.weight if isinstance(table, nn.Module) else table
    # of a sharded table
    whole, over_shards = (getattr(weight, f"freescale_{name}", None) for name in ("catalogue", "ranks"))
    if hidden.dim() != 2 or (whole is None and (weight.dim() != 2 or hidden.shape[1] != weight.shape[1])):
        raise ValueError(
            f"catalogue_ranks(hidden of shape {list(hidden.shape)}, table of shape {list(weight.shape)}): pass [samples, dim] "
            "and [items, dim]"
        )
    _refuse(torch.Size((len(hidden), len(weight))), targets, seen)
    ranks: Tensor | None = None if over_shards is None or bias is not None else over_shards(hidden, targets, seen)
    if ranks is not None:
        return ranks
    weight = weight if whole is None else whole()
    found, size = torch.empty_like(targets), max(1, _CHUNK_SCORES // max(1, len(weight)))
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        scores = torch.nn.functional.linear(hidden[part], weight, bias)
        found[part] = _ranks(scores, targets[part], None if seen is None else seen[part])
    return found


def _refuse(shape: torch.Size, targets: Tensor, seen: Tensor | None) -> None:
    if len(shape) != 2 or targets.shape != shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets of shape {list(targets.shape)} and dtype {targets.dtype} for scores of shape {list(shape)}: pass scores "
            "[samples, items] and one item for each sample, int64"
        )
    if seen is not None and (seen.dim() != 2 or len(seen) != shape[0] or seen.dtype != torch.int64):
        raise ValueError(
            f"seen of shape {list(seen.shape)} and dtype {seen.dtype} for {shape[0]} samples: pass [samples, any], int64, with "
            "negative numbers where a sample has fewer"
        )


def _ranks(scores: Tensor, targets: Tensor, seen: Tensor | None) -> Tensor:
    before = ~(scores < scores.gather(1, targets[:, None]))  # also what compares with nothing
    if seen is not None:
        rows, places = (seen >= 0).nonzero(as_tuple=True)
        before[rows, seen[rows, places]] = False
    return before.scatter_(1, targets[:, None], False).sum(dim=1)
