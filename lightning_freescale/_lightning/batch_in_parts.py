"""Micro-batches in Lightning's training loop, computed by the loop's own closures.

The loop sees one batch. Inside, each micro-batch has its own ``training_step`` and backward, like batches with accumulated
gradients. Lightning's gradient accumulation is not used, because it counts every part as a batch. That would change
``batch_idx``, limits of batches, validation intervals, progress bars and checkpoints, and the number of parts would be fixed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from torch import Tensor

from lightning_freescale._lightning.loops import Trainer
from lightning_freescale._runtime.attributes import replaced
from lightning_freescale.balance.micro_batches import MicroBatches


@contextmanager
def micro_batches_in(trainer: Trainer, take_loaded: Callable[[MicroBatches], None] | None = None) -> Iterator[None]:
    """Make the fit accept batches of type :class:`MicroBatches`, by replacing methods without public hooks.

    ``take_loaded`` is called with each such batch before the user's hooks get its parts.
    """
    optimization, module = trainer.fit_loop.epoch_loop.automatic_optimization, trainer.lightning_module
    make_closure, before_transfer = optimization._make_closure, module._on_before_batch_transfer

    def closure_of_parts(kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Closure:
        batch = kwargs.get("batch")
        if not isinstance(batch, MicroBatches):
            return make_closure(kwargs, optimizer, batch_idx)
        parts = []
        for index, part in enumerate(batch.batches):
            of_part: OrderedDict[str, Any] = OrderedDict(kwargs, batch=part)
            parts.append(make_closure(of_part, optimizer, batch_idx))
            if index:
                parts[-1]._zero_grad_fn = None
        return _MicroBatchClosure(trainer, batch, parts)

    def before_transfer_of_parts(batch: Any, dataloader_idx: int = 0) -> Any:
        if take_loaded is not None and isinstance(batch, MicroBatches):
            take_loaded(batch)
        return of_each_part(lambda part: before_transfer(part, dataloader_idx), batch)

    # an inner fit, such as that of LearningRateFinder, uses the replaced methods of the outer fit
    with (
        replaced(optimization, {"_make_closure": closure_of_parts}),
        replaced(module, {"_on_before_batch_transfer": before_transfer_of_parts}),
    ):
        yield


def counting_all_samples(trainer: Trainer) -> ExitStack:
    """Let each ``ThroughputMonitor`` count all micro-batches, and the mean number of samples of all ranks.

    Lightning takes rank 0's number of samples times the number of ranks as the number of all samples.
    """

    def count(fn: Callable[[Any], int], items: bool, batch: Any) -> float:
        mine = sum(map(fn, batch.batches if isinstance(batch, MicroBatches) else (batch,)))
        sampler: Any = getattr(trainer.train_dataloader, "sampler", None)
        if items or not trainer.training or not hasattr(sampler, "counts"):
            return mine
        counts = sampler.counts(trainer.fit_loop.epoch_loop.batch_idx)
        return float(mine * sum(counts) / (len(counts) * counts[trainer.global_rank]))

    stack = ExitStack()
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(each, ThroughputMonitor):
            counts = {"batch_size_fn": partial(count, each.batch_size_fn, False)}
            if each.length_fn is not None:
                counts["length_fn"] = partial(count, each.length_fn, True)
            stack.enter_context(replaced(each, counts))
    return stack


def of_each_part(fn: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to every micro-batch of a batch, or to a batch without micro-batches."""
    return batch.map(fn) if isinstance(batch, MicroBatches) else fn(batch)


class _MicroBatchClosure(Closure):
    """Runs the closures of the micro-batches, with losses weighted by share. Dense gradients are reduced with the last one.

    If ``training_step`` returns None for a part, its loss counts as 0. Lightning allows that only with a single rank.
    """

    def __init__(self, trainer: Trainer, batch: MicroBatches, parts: list[Closure]) -> None:
        super().__init__(step_fn=parts[0]._step_fn)
        self._trainer, self._batch, self._parts = trainer, batch, parts
        for part, share in zip(parts, batch.shares if not batch.loss_is_sum else ()):
            part._step_fn = _weighed(part._step_fn, share)

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Run all closures, and return the output of ``training_step`` for the whole batch."""
        trainer, results = self._trainer, []
        logged = _LoggedInParts(trainer)
        for index, (part, run) in enumerate(zip(self._batch.batches, self._parts)):
            last = index == len(self._parts) - 1
            with logged.part(part, self._batch.shares[index]), _block_parallel_sync_behavior(trainer.strategy, block=not last):
                try:
                    results.append(run.closure(*args, **kwargs))
                except RuntimeError as error:
                    if not str(error).startswith("Skipping the `training_step` by returning None"):
                        raise
                    raise ValueError(
                        f"training_step returned None for micro-batch {index + 1} of {len(self._parts)}. With several ranks, "
                        "no rank may skip one. Return a loss of 0 that is part of the graph, such as 0 * predicted.sum(), or "
                        "use FreeScaleDataModule(micro_batches=1)"
                    ) from error
        logged.combine()
        return _whole(results, self._batch.shares)


def _weighed(step_fn: Callable[[], ClosureResult], share: float) -> Callable[[], ClosureResult]:
    def weighed() -> ClosureResult:
        result = step_fn()
        loss = None if result.closure_loss is None else result.closure_loss * share
        return ClosureResult(loss, extra=result.extra)

    return weighed


def _whole(results: list[ClosureResult], shares: tuple[float, ...]) -> ClosureResult:
    """Combine the outputs of all parts: losses as their sum, other numbers as their mean by share, anything else as a list."""
    losses = [result.loss for result in results if result.loss is not None]
    extra = {}
    for name in dict.fromkeys(name for result in results for name in result.extra):
        values = [result.extra.get(name) for result in results]
        numbers = [(value, share) for value, share, result in zip(values, shares, results) if name in result.extra]
        single = (isinstance(value, (float, int)) or (isinstance(value, Tensor) and value.numel() == 1) for value, _ in numbers)
        extra[name] = _mean(*zip(*numbers)) if all(single) else values
    whole = ClosureResult(None, extra=extra)
    whole.loss = torch.stack(losses).sum() if losses else None
    return whole


def _mean(values: Sequence[Any], shares: Sequence[float]) -> Any:
    total = sum(shares)
    return sum(value * (share / total if total else 1 / len(shares)) for value, share in zip(values, shares))


class _LoggedInParts:
    """Combines the values that ``self.log`` gets for each micro-batch into one value for the whole batch."""

    def __init__(self, trainer: Trainer) -> None:
        self._connector, self._results = trainer._logger_connector, trainer._results
        self._first = self._connector._first_loop_iter
        self._shown: dict[str, list[tuple[float, Tensor]]] = {}

    @contextmanager
    def part(self, batch: Any, share: float) -> Iterator[None]:
        """Record the values logged in a part. Lightning reads the batch size from ``batch``."""
        results = self._results
        assert results is not None
        whole = results.batch
        results.batch, results.batch_size = batch, None
        before = {key: metric._forward_cache for key, metric in results.items()}
        yield
        for key, metric in results.items():
            shown = metric._forward_cache
            if metric.is_tensor and metric.meta.on_step and shown is not None and shown is not before.get(key):
                self._shown.setdefault(key, []).append((share, shown))
        results.batch, results.batch_size = whole, None
        if self._first:  # in the first batch, Lightning would otherwise reset the values of the previous parts
            self._connector._first_loop_iter = False

    def combine(self) -> None:
        """Set the value of the step: the mean of the parts by share, or the reduction that the user has requested."""
        self._connector._first_loop_iter = self._first
        assert self._results is not None
        for key, values in self._shown.items():
            metric, shown = self._results[key], [value for _, value in values]
            if metric.meta.is_mean_reduction:
                value = _mean(shown, [share for share, _ in values])
            else:
                value = metric.meta.reduce_fx(torch.stack(shown))
            metric._forward_cache = value
            if not metric.meta.on_epoch:
                metric.value = value
