"""Losses over a whole catalogue of items. The package needs only torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["catalogue_cross_entropy"]

Reduction = Literal["mean", "sum", "none"]

_CHUNK_LOGITS = 2**24
"""The number of logits per chunk with ``chunk="auto"``: 64 MiB in float32, enough to keep a processor busy."""
_KEPT_LOGITS = 2**26
"""The largest number of logits that a rank keeps for backward. More logits are computed again."""


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

    The logits are computed in chunks of positions. If the batch has more than 2^26 logits, backward computes each chunk again.
    Memory then grows with ``chunk x items`` instead of ``positions x items``, and the matrix product is computed twice. Under
    autocast the products are computed in its dtype, and the softmax in float32.

    With a table that strategy ``"freescale"`` shards, the call and its backward are collective in a training step. The hidden
    states of all ranks are gathered, and each rank computes their logits for its own rows. Every rank must make the same
    calls, even if it has no positions. Outside of training, under ``torch.no_grad()``, the whole table is gathered.

    Args:
        hidden: hidden states that predict an item, shape ``[..., dim]``.
        table: the weight of shape ``[items, dim]``, or a module with this ``weight``, such as an ``nn.Embedding`` or a table
            of a TorchRec collection, ``collection.embeddings["item"]``.
        targets: the target item of each position, int64 of shape ``[...]``.
        bias: shape ``[items]``.
        ignore_index: target of positions to ignore.
        label_smoothing: share of the target's probability that is spread over all items, from 0 to 1.
        reduction: ``"mean"`` over the positions that are not ignored, ``"sum"``, or ``"none"``. The result of ``"none"`` has
            shape ``[...]`` and is 0 at ignored positions.
        temperature: divisor of the logits, above 0.
        chunk: the number of positions per chunk; ``"auto"`` chooses chunks of 2^24 logits.

    Raises:
        ValueError: an argument has a wrong shape, dtype or value.
        IndexError: a target on the CPU is not a row of ``table``. On a GPU a device-side assertion fails instead.

    Examples:
        >>> hidden, items = torch.ones(2, 3, 4), torch.eye(4)
        >>> catalogue_cross_entropy(hidden, items, torch.tensor([[0, 1, -100], [2, 3, 3]]))
        tensor(1.3863)
    """
    rows = _catalogue_rows(table)
    _check(hidden, rows, targets, bias, label_smoothing, reduction, temperature, chunk)
    counts = targets != ignore_index
    states, wanted = hidden[counts], targets[counts]
    if wanted.device.type == "cpu" and len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < rows.items:
        raise IndexError(
            f"catalogue_cross_entropy got targets from {int(wanted.min())} to {int(wanted.max())}, but the table has rows 0 to "
            f"{rows.items - 1}. Use ignore_index={ignore_index} for positions to ignore."
        )
    losses = _ChunkedLoss.apply(states, rows.trained, bias, wanted, rows, label_smoothing, temperature, chunk)
    if reduction == "none":
        return losses.new_zeros(targets.shape).masked_scatter(counts, losses)
    return losses.mean() if reduction == "mean" else losses.sum()


class Positions:
    """The positions of all ranks in one call of a loss: those of this rank, unless a subclass has others."""

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of all ranks, concatenated by rank: shape ``[positions, ...]`` each. Collective."""
        return tensors

    def to_ranks(self, values: Tensor) -> Callable[[], Tensor]:
        """Start to send each rank the values of its positions, shape ``[positions, ...]``. Collective.

        The result waits and returns the values from all shards: shape ``[shards, positions of this rank, ...]``.
        """
        return lambda: values[None]


class CatalogueRows:
    """The rows of a catalogue on this rank: the whole weight, unless a subclass has a part of it."""

    excluded: Tensor | None = None  # indices in weight of rows that are not items, int64

    def __init__(self, weight: Tensor) -> None:
        self.items = len(weight)  # number of items in the whole catalogue
        self.weight = weight  # rows on this rank, shape [rows, dim]
        self.trained = weight  # what autograd differentiates; in a subclass an empty tensor that requires a gradient

    def positions(self, count: int) -> Positions:
        """Return the positions of all ranks; this rank has ``count`` of them. Collective."""
        return Positions()

    def places(self, items: Tensor) -> Tensor:
        """Return the index in ``weight`` of each item, int64; negative for items of other ranks."""
        return items

    def select(self, by_item: Tensor) -> Tensor:
        """Return the entries of a tensor of shape ``[items]`` for the rows of ``weight``: shape ``[rows]``."""
        return by_item

    def spread(self, by_row: Tensor) -> Tensor:
        """Return a tensor of shape ``[items]`` with ``by_row`` at the items of ``weight`` and zeros elsewhere."""
        return by_row

    def take_gradient(self, gradient: Tensor) -> Tensor | None:
        """Store the gradient of ``weight`` and return the gradient of ``trained``."""
        return gradient


def _catalogue_rows(table: Tensor | nn.Module) -> CatalogueRows:
    weight: Any = table.weight if isinstance(table, nn.Module) else table
    # the weight of a sharded table has a function that returns the whole weight or CatalogueRows
    find = getattr(weight, "freescale_catalogue", None)
    found = weight if find is None else find()
    if isinstance(found, Tensor):
        if found.dim() != 2 or not len(found):
            raise ValueError(f"catalogue_cross_entropy got a table of shape {list(found.shape)}. Pass [items, dim].")
        return CatalogueRows(found)
    rows: CatalogueRows = found
    return rows


def _check(
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
        raise ValueError(f"catalogue_cross_entropy got {argument}. {fix}.")

    if hidden.dim() < 1 or hidden.shape[-1] != rows.weight.shape[1]:
        shape = [rows.items, rows.weight.shape[1]]
        refuse(f"hidden of shape {list(hidden.shape)} and a table of shape {shape}", "Pass [..., dim] and [items, dim]")
    if targets.shape != hidden.shape[:-1]:
        refuse(f"targets of shape {list(targets.shape)}", f"Pass one item per position, shape {list(hidden.shape[:-1])}")
    if targets.dtype != torch.int64:
        refuse(f"targets of dtype {targets.dtype}", "Pass the indices of items as int64")
    if bias is not None and bias.shape != (rows.items,):
        refuse(f"bias of shape {list(bias.shape)}", f"Pass one value per item, shape {[rows.items]}")
    if not 0 <= label_smoothing <= 1:
        refuse(f"label_smoothing={label_smoothing!r}", "Pass a number from 0 to 1")
    if reduction not in get_args(Reduction):
        refuse(f"reduction={reduction!r}", f"Choose one of {', '.join(get_args(Reduction))}")
    if not (math.isfinite(temperature) and temperature > 0):
        refuse(f"temperature={temperature!r}", "Pass a number above 0")
    if chunk != "auto" and not (isinstance(chunk, int) and chunk >= 1):
        refuse(f"chunk={chunk!r}", "Pass 'auto' or a number of positions of at least 1")


class _ChunkedLoss(torch.autograd.Function):
    """The loss of each position, shape ``[positions]``, in float32 or better.

    With a sharded table, ``every`` has the hidden states of all ranks. This rank computes partial results for its own rows and
    sends them back.
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
        ctx.kept = [] if len(every) * len(rows.weight) <= _KEPT_LOGITS and any(ctx.needs_input_grad) else None
        found = torch.zeros(len(every), 3 if label_smoothing else 2, dtype=ctx.sums, device=states.device)
        tops = found.new_full((len(every),), -math.inf)
        found[:, 0] = tops  # remains if the shard has no rows
        for part, logits in _chunks(ctx, every, bias_here):
            if label_smoothing:
                found[part, 2] = logits.sum(1)
            if rows.excluded is not None:
                if label_smoothing:
                    found[part, 2] -= logits[:, rows.excluded].sum(1)
                logits[:, rows.excluded] = -math.inf
            here = (places[part] >= 0).nonzero()[:, 0]
            found[part, 1].index_copy_(0, here, logits[here, places[part][here]])
            tops[part] = logits.amax(1).clamp_(min=torch.finfo(ctx.sums).min)  # the maximum is -inf if no row is an item
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
        kept, ctx.kept = ctx.kept, None  # changed in place below, so a second backward cannot use it
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
        # send the gradients of the states while the gradient of the weight is computed, for all kept chunks or the last one
        sent = None if of_states is None else positions.to_ranks(of_states)
        _add_weight_gradient(of_weight, every, held, ctx)
        found = (
            None if sent is None else sent().sum(0),
            None if of_weight is None else rows.take_gradient(of_weight),
            None if of_bias is None else rows.spread(of_bias),
        )
        return *(None if each is None else each.to(dtype) for each, dtype in zip(found, ctx.dtypes)), *[None] * 5


def _add_weight_gradient(of_weight: Tensor | None, every: Tensor, held: list[tuple[slice, Tensor]], ctx: Any) -> None:
    """Add the chunks' gradients of the weight and free the chunks."""
    while held:
        part, of_logits = held.pop(0)
        if of_weight is not None:
            of_weight += of_logits.T @ every[part]


def _parts(positions: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, positions, size))


def _chunks(ctx: Any, every: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of positions with their logits, divided by the temperature."""
    with torch.autocast(ctx.kind, enabled=False):
        short = ctx.rows.weight.to(ctx.products).T
        for part in _parts(len(every) if len(ctx.rows.weight) else 0, ctx.size):
            logits = (every[part] @ short).to(ctx.sums)
            if bias is not None:
                logits += bias
            yield part, logits if ctx.temperature == 1 else logits.div_(ctx.temperature)
