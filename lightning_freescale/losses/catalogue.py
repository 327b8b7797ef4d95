"""Cross-entropy over all items of a catalogue, computed in chunks of positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Reduction = Literal["mean", "sum", "none"]

_CHUNK_LOGITS = 2**24
"""Logits of a chunk with ``chunk="auto"``: 64 MiB in float32, which keeps a processor busy."""
_KEPT_LOGITS = 2**26
"""Logits that are kept for backward at most; more are computed again."""


def catalogue_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    temperature: float = 1.0,
    chunk: int | Literal["auto"] = "auto",
) -> Tensor:
    """Return ``F.cross_entropy((hidden @ weight.T + bias) / temperature, targets)`` without all logits in memory.

    The logits of some positions are computed at a time. If all logits of the batch are more than 2^26, backward computes them
    again, chunk by chunk. Memory then grows with ``chunk x items`` instead of ``positions x items``, and the matrix product is
    computed twice. Under autocast the products are computed in its dtype, and the softmax in float32.

    Args:
        hidden: states that predict an item, shape ``[..., dim]``.
        weight: a row for each item, shape ``[items, dim]``, such as the weight of an ``nn.Embedding``. It must be whole: the
            weight of a table that strategy ``"freescale"`` shards is refused where it is read.
        targets: the item of each state, int64 of shape ``[...]``.
        bias: shape ``[items]``.
        ignore_index: target of the positions that do not count.
        label_smoothing: share of the target's probability that all items share, from 0 to 1.
        reduction: ``"mean"`` over the positions that count, ``"sum"``, or ``"none"``, which returns shape ``[...]`` with 0 for
            the positions that do not count.
        temperature: divides the logits; above 0.
        chunk: positions whose logits are computed together; ``"auto"``: as many as have 2^24 logits.

    Raises:
        ValueError: an argument does not fit; names it, its value and the fix.
        IndexError: a target on the CPU is no row of ``weight``. On a GPU a device-side assertion fires.

    Examples:
        >>> hidden, items = torch.ones(2, 3, 4), torch.eye(4)
        >>> catalogue_cross_entropy(hidden, items, torch.tensor([[0, 1, -100], [2, 3, 3]]))
        tensor(1.3863)
    """
    _refuse(hidden, weight, targets, bias, label_smoothing, reduction, temperature, chunk)
    counts = targets != ignore_index
    states, wanted = hidden[counts], targets[counts]
    if wanted.device.type == "cpu" and len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(weight):
        raise IndexError(
            f"catalogue_cross_entropy(targets): {int(wanted.min())} to {int(wanted.max())}, and weight has rows 0 to "
            f"{len(weight) - 1}. Positions that do not count have ignore_index={ignore_index}"
        )
    size = max(1, _CHUNK_LOGITS // len(weight)) if chunk == "auto" else chunk
    losses = _ChunkedLoss.apply(states, weight, bias, wanted, label_smoothing, temperature, size)
    if reduction == "none":
        return losses.new_zeros(targets.shape).masked_scatter(counts, losses)
    return losses.mean() if reduction == "mean" else losses.sum()


def _refuse(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    label_smoothing: float,
    reduction: str,
    temperature: float,
    chunk: int | str,
) -> None:
    def refuse(argument: str, fix: str) -> None:
        raise ValueError(f"catalogue_cross_entropy({argument}): {fix}")

    if weight.dim() != 2 or not len(weight) or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        refuse(
            f"hidden of shape {list(hidden.shape)}, weight of shape {list(weight.shape)}", "pass [..., dim] and [items, dim]"
        )
    if targets.shape != hidden.shape[:-1]:
        refuse(f"targets of shape {list(targets.shape)}", f"pass one item for each state, shape {list(hidden.shape[:-1])}")
    if targets.dtype != torch.int64:
        refuse(f"targets of dtype {targets.dtype}", "pass the numbers of items, int64")
    if bias is not None and bias.shape != weight.shape[:1]:
        refuse(f"bias of shape {list(bias.shape)}", f"pass one number for each item, shape {list(weight.shape[:1])}")
    if not 0 <= label_smoothing <= 1:
        refuse(f"label_smoothing={label_smoothing!r}", "pass a number from 0 to 1")
    if reduction not in get_args(Reduction):
        refuse(f"reduction={reduction!r}", f"choose one of {', '.join(get_args(Reduction))}")
    if not (math.isfinite(temperature) and temperature > 0):
        refuse(f"temperature={temperature!r}", "pass a number above 0")
    if chunk != "auto" and not (isinstance(chunk, int) and chunk >= 1):
        refuse(f"chunk={chunk!r}", "pass 'auto', or a number of positions, at least 1")


class _ChunkedLoss(torch.autograd.Function):
    """The loss of each position, shape ``[positions]``, in float32 or better."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        label_smoothing: float,
        temperature: float,
        size: int,
    ) -> Tensor:
        kind, products = states.device.type, torch.promote_types(states.dtype, weight.dtype)
        if torch.is_autocast_enabled(kind):
            products = torch.get_autocast_dtype(kind)
        ctx.kind, ctx.products, ctx.size = kind, products, size
        ctx.smoothing, ctx.temperature = label_smoothing, temperature
        ctx.sums = torch.promote_types(products, torch.float32)
        keeps = len(states) * len(weight) <= _KEPT_LOGITS and any(ctx.needs_input_grad)
        ctx.kept = [] if keeps else None
        norms, losses = (torch.empty(len(states), dtype=ctx.sums, device=states.device) for _ in range(2))
        for part, logits in _chunks(ctx, states, weight, bias):
            norms[part] = logits.logsumexp(1)
            hit = logits.gather(1, targets[part, None])[:, 0]
            if label_smoothing:
                hit = torch.lerp(hit, logits.mean(1), label_smoothing)
            losses[part] = norms[part] - hit
            if ctx.kept is not None:
                ctx.kept.append(logits)
        ctx.save_for_backward(states, weight, bias, targets, norms)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets, norms = ctx.saved_tensors
        of_states, of_weight, of_bias = (
            torch.zeros_like(given, dtype=ctx.sums) if needed else None
            for given, needed in zip((states, weight, bias), ctx.needs_input_grad)
        )
        rows, items = weight.to(ctx.products), len(weight)
        kept, ctx.kept = ctx.kept, None  # changed in place below, so of one backward alone
        recomputed = _chunks(ctx, states, weight, bias)
        for part, logits in recomputed if kept is None else zip(_parts(len(states), ctx.size), kept):
            of_logits = logits.sub_(norms[part, None]).exp_()
            if ctx.smoothing:
                of_logits -= ctx.smoothing / items
            hit = of_logits.new_full((len(of_logits), 1), ctx.smoothing - 1)
            of_logits.scatter_add_(1, targets[part, None], hit).mul_(gradient[part, None] / ctx.temperature)
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            factors = of_logits.to(ctx.products)
            if of_states is not None:
                of_states[part] = (factors @ rows).to(ctx.sums)
            if of_weight is not None:
                of_weight += factors.T @ states[part].to(ctx.products)
        found = zip((of_states, of_weight, of_bias), (states, weight, bias))
        return *(None if each is None else each.to(given.dtype) for each, given in found), None, None, None, None


def _parts(positions: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, positions, size))


def _chunks(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield the logits of some positions at a time, divided by the temperature."""
    with torch.autocast(ctx.kind, enabled=False):
        rows = weight.to(ctx.products).T
        for part in _parts(len(states), ctx.size):
            logits = (states[part].to(ctx.products) @ rows).to(ctx.sums)
            if bias is not None:
                logits += bias
            yield part, logits.div_(ctx.temperature)
