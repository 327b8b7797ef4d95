"""Cross-entropy over all items of a catalogue, computed in chunks of positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_freescale.losses.catalogue_rows import CatalogueRows, catalogue_rows

Reduction = Literal["mean", "sum", "none"]

_CHUNK_LOGITS = 2**24
"""Logits of a chunk with ``chunk="auto"``: 64 MiB in float32, which keeps a processor busy."""
_KEPT_LOGITS = 2**26
"""Logits that a rank keeps for backward at most; more are computed again."""


def catalogue_cross_entropy(
    hidden: Tensor,
    table: Tensor | nn.Module,
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

    In a training step with a table that strategy ``"freescale"`` shards, the call and its backward are collective: the states
    of all ranks are gathered, and each rank computes their logits against its own rows. Every rank must make the same calls,
    also a rank that has no position. Outside of training, under ``torch.no_grad()``, the table is gathered on the rank.

    Args:
        hidden: states that predict an item, shape ``[..., dim]``.
        table: a row for each item: the weight of shape ``[items, dim]``, or a module that has it as its ``weight``, such as an
            ``nn.Embedding`` or a table of a TorchRec collection, ``collection.embeddings["item"]``.
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
        IndexError: a target on the CPU is no row of ``table``. On a GPU a device-side assertion fires.

    Examples:
        >>> hidden, items = torch.ones(2, 3, 4), torch.eye(4)
        >>> catalogue_cross_entropy(hidden, items, torch.tensor([[0, 1, -100], [2, 3, 3]]))
        tensor(1.3863)
    """
    rows = catalogue_rows(table)
    _refuse(hidden, rows, targets, bias, label_smoothing, reduction, temperature, chunk)
    counts = targets != ignore_index
    states, wanted = hidden[counts], targets[counts]
    if wanted.device.type == "cpu" and len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < rows.items:
        raise IndexError(
            f"catalogue_cross_entropy(targets): {int(wanted.min())} to {int(wanted.max())}, and the table has rows 0 to "
            f"{rows.items - 1}. Positions that do not count have ignore_index={ignore_index}"
        )
    losses = _ChunkedLoss.apply(states, rows.trained, bias, wanted, rows, label_smoothing, temperature, chunk)
    if reduction == "none":
        return losses.new_zeros(targets.shape).masked_scatter(counts, losses)
    return losses.mean() if reduction == "mean" else losses.sum()


def keeps_logits(positions: int, rows: int) -> bool:
    """Return whether the logits of some positions are kept for backward; else they are computed again."""
    return positions * rows <= _KEPT_LOGITS


def _refuse(
    hidden: Tensor,
    rows: CatalogueRows,
    targets: Tensor,
    bias: Tensor | None,
    label_smoothing: float,
    reduction: str,
    temperature: float,
    chunk: int | str,
) -> None:
    def refuse(argument: str, fix: str) -> None:
        raise ValueError(f"catalogue_cross_entropy({argument}): {fix}")

    if hidden.dim() < 1 or hidden.shape[-1] != rows.weight.shape[1]:
        shape = [rows.items, rows.weight.shape[1]]
        refuse(f"hidden of shape {list(hidden.shape)}, table of shape {shape}", "pass [..., dim] and [items, dim]")
    if targets.shape != hidden.shape[:-1]:
        refuse(f"targets of shape {list(targets.shape)}", f"pass one item for each state, shape {list(hidden.shape[:-1])}")
    if targets.dtype != torch.int64:
        refuse(f"targets of dtype {targets.dtype}", "pass the numbers of items, int64")
    if bias is not None and bias.shape != (rows.items,):
        refuse(f"bias of shape {list(bias.shape)}", f"pass one number for each item, shape {[rows.items]}")
    if not 0 <= label_smoothing <= 1:
        refuse(f"label_smoothing={label_smoothing!r}", "pass a number from 0 to 1")
    if reduction not in get_args(Reduction):
        refuse(f"reduction={reduction!r}", f"choose one of {', '.join(get_args(Reduction))}")
    if not (math.isfinite(temperature) and temperature > 0):
        refuse(f"temperature={temperature!r}", "pass a number above 0")
    if chunk != "auto" and not (isinstance(chunk, int) and chunk >= 1):
        refuse(f"chunk={chunk!r}", "pass 'auto', or a number of positions, at least 1")


class _ChunkedLoss(torch.autograd.Function):
    """The loss of each position, shape ``[positions]``, in float32 or better.

    With a sharded table, positions of all ranks meet the rows of this one: ``every`` has their states, and what is found for
    them goes back to their ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        trained: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rows: CatalogueRows,
        label_smoothing: float,
        temperature: float,
        chunk: int | Literal["auto"],
    ) -> Tensor:
        kind, products = states.device.type, torch.promote_types(states.dtype, rows.weight.dtype)
        if torch.is_autocast_enabled(kind):
            products = torch.get_autocast_dtype(kind)
        ctx.kind, ctx.products, ctx.rows = kind, products, rows
        ctx.smoothing, ctx.temperature = label_smoothing, temperature
        ctx.sums = torch.promote_types(products, torch.float32)
        ctx.dtypes = states.dtype, trained.dtype, None if bias is None else bias.dtype
        ctx.size = max(1, _CHUNK_LOGITS // max(1, len(rows.weight))) if chunk == "auto" else chunk
        ctx.positions = positions = rows.positions(len(states))
        every, wanted = positions.gather(states.to(products), targets)
        places, bias_here = rows.places(wanted), None if bias is None else rows.select(bias)
        ctx.kept = [] if keeps_logits(len(every), len(rows.weight)) and any(ctx.needs_input_grad) else None
        found = torch.zeros(len(every), 3 if label_smoothing else 2, dtype=ctx.sums, device=states.device)
        tops = found.new_full((len(every),), -math.inf)
        found[:, 0] = tops  # of a shard without rows
        for part, logits in _chunks(ctx, every, bias_here):
            if label_smoothing:
                found[part, 2] = logits.sum(1)
            if rows.excluded is not None:
                if label_smoothing:
                    found[part, 2] -= logits[:, rows.excluded].sum(1)
                logits[:, rows.excluded] = -math.inf
            here = (places[part] >= 0).nonzero()[:, 0]
            found[part, 1].index_copy_(0, here, logits[here, places[part][here]])
            tops[part] = logits.amax(1).clamp_(min=torch.finfo(ctx.sums).min)  # also where no row is an item
            exponentials = logits.sub_(tops[part, None]).exp_()
            found[part, 0] = exponentials.sum(1).log_().add_(tops[part])
            if ctx.kept is not None:
                ctx.kept.append(exponentials)
        by_shard = positions.to_ranks(found)()
        norms, hits = by_shard[..., 0].logsumexp(0), by_shard[..., 1].sum(0)
        if label_smoothing:
            hits = torch.lerp(hits, by_shard[..., 2].sum(0) / rows.items, label_smoothing)
        ctx.save_for_backward(every, rows.weight, bias_here, places, tops, norms)
        return norms - hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        every, weight, bias, places, tops, norms = ctx.saved_tensors
        rows, positions = ctx.rows, ctx.positions
        kept, ctx.kept = ctx.kept, None  # changed in place below, so of one backward alone
        of_states, of_weight, of_bias = (
            torch.zeros(shape, dtype=ctx.sums, device=weight.device) if needed else None
            for shape, needed in zip((every.shape, weight.shape, weight.shape[:1]), ctx.needs_input_grad)
        )
        norms, factors = positions.gather(norms, gradient.to(ctx.sums) / ctx.temperature)
        of_exponentials = factors if kept is None else (tops - norms).exp_() * factors
        short = weight.to(ctx.products)
        held: list[tuple[slice, Tensor]] = []
        recomputed = _chunks(ctx, every, bias)
        for part, found in recomputed if kept is None else zip(_parts(len(every), ctx.size), kept):
            if kept is None:
                _add_weight_gradient(of_weight, every, held, ctx)
                found.sub_(norms[part, None]).exp_()
            of_logits = found.mul_(of_exponentials[part, None])
            if ctx.smoothing:
                of_logits -= ctx.smoothing / rows.items * factors[part, None]
            if rows.excluded is not None:
                of_logits[:, rows.excluded] = 0.0
            here = (places[part] >= 0).nonzero()[:, 0]
            of_logits[here, places[part][here]] += (ctx.smoothing - 1) * factors[part][here]
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            short_of_logits = of_logits.to(ctx.products)
            if of_states is not None:
                of_states[part] = (short_of_logits @ short).to(ctx.sums)
            held.append((part, short_of_logits))
        # the states' gradients travel while the weight's are computed: those of all chunks that are kept, else of the last one
        sent = None if of_states is None else positions.to_ranks(of_states)
        _add_weight_gradient(of_weight, every, held, ctx)
        found = (
            None if sent is None else sent().sum(0),
            None if of_weight is None else rows.take_gradient(of_weight),
            None if of_bias is None else rows.spread(of_bias),
        )
        return *(None if each is None else each.to(dtype) for each, dtype in zip(found, ctx.dtypes)), *[None] * 5


def _add_weight_gradient(of_weight: Tensor | None, every: Tensor, held: list[tuple[slice, Tensor]], ctx: Any) -> None:
    """Add the gradients of the weight by some chunks, and let go of these."""
    while held:
        part, of_logits = held.pop(0)
        if of_weight is not None:
            of_weight += of_logits.T @ every[part]


def _parts(positions: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, positions, size))


def _chunks(ctx: Any, every: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield the logits of some positions at a time, divided by the temperature."""
    with torch.autocast(ctx.kind, enabled=False):
        short = ctx.rows.weight.to(ctx.products).T
        for part in _parts(len(every) if len(ctx.rows.weight) else 0, ctx.size):
            logits = (every[part] @ short).to(ctx.sums)
            if bias is not None:
                logits += bias
            yield part, logits if ctx.temperature == 1 else logits.div_(ctx.temperature)
