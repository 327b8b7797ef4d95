"""Training data that arrives in a stream of each rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch.utils.data import IterableDataset

from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.balance import CostModel, assign
from lightning_freescale.comm import BACKEND
from lightning_freescale.comm.options import LazyGlooOptions
from lightning_freescale.data.options import DataArguments
from lightning_freescale.data.streaming import BalancedStreamLoader
from lightning_freescale.data.streaming.steps import assign_as_read
from lightning_freescale.data.validation import loss_weight_fn, refuse_options, refuse_unused


class IterableData:
    """An iterable data set, the costs of its samples, and their assignment to the ranks."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        given: DataArguments,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int,
    ) -> None:
        context = "an IterableDataset, because its samples are unknown before they arrive"
        unused = {"batch_tokens": given.batch_tokens is not None, "shuffle": given.shuffle is not True}
        refuse_unused(context, **unused, seed=given.seed != 0)
        options = given.options
        if options.padding == "batch":
            raise ValueError(
                "BalanceOptions(padding='batch') needs lengths before the fit, which an IterableDataset does not have. Pass "
                "padding='auto', or a map-style data set"
            )
        refuse_options(context, options, "max_tokens_per_rank", "tokens")
        mode = "fixed" if options.assignment_mode == "auto" else options.assignment_mode
        self.assignment_mode = mode if given.balances else "as drawn"
        self._make_loader = partial(
            BalancedStreamLoader,
            dataset,
            given.batch_size,
            cost_fn=_sample_cost_fn(given.lengths, None if given.has_auto_cost else given.cost),
            weight_fn=loss_weight_fn(given.loss_reduction, given.lengths, given.target_counts),
            loss_is_sum=given.loss_reduction == "sum",
            collate_fn=collate_fn,
            num_workers=num_workers,
            drop_last=given.drop_last,
            assign_fn=partial(assign, assignment_mode=mode) if given.balances else assign_as_read,
        )
        self._group: dist.ProcessGroup | None = None
        self._given = given
        self.reset_progress()
        self._make_loader()  # raises for invalid arguments now instead of at the start of the fit
        assign([1.0], 1, assignment_mode=mode)

    def reset_progress(self) -> None:
        """Forget an earlier fit, also a failed one."""
        self.destroy_group()
        self._states: list[dict[str, Any]] = []  # one per rank of a checkpoint inside an epoch
        self._loader: BalancedStreamLoader | None = None
        self.micro_batches = self._given.new_schedule()  # numbers of micro-batches in the steps of this fit

    def loader(self, rank: int, world_size: int, epoch: int = 0, timeout: timedelta | None = None) -> BalancedStreamLoader:
        """Return the loader of a rank, which resumes from a loaded checkpoint. Collective."""
        if world_size > 1 and self._group is None:
            # a separate lane, because the loader's thread must not queue behind the collectives of training
            lane = LazyGlooOptions(name="samples", priority=-1)
            self._group = cast("dist.ProcessGroup", dist.new_group(backend=BACKEND, timeout=timeout, pg_options=lane))
        loader = self._loader = self._make_loader(
            rank=rank, world_size=world_size, group=self._group, micro_batches=self.micro_batches
        )
        if len(self._states) == world_size:
            loader.load_state_dict(self._states[rank])
        elif self._states:
            loader.read_on(self._states)
        loader.set_epoch(epoch)
        return loader

    def state_dict(self, epoch: int, batches: int, world_size: int) -> dict[str, Any]:
        """Return all ranks' states after ``batches`` steps of ``epoch``, on every rank. Collective."""
        if self._loader is None:  # no sample of the epoch was read
            return {"streams": [{"epoch": epoch, "batches": 0, "stream": None}] * world_size}
        self._loader.set_epoch(epoch)
        own_state = self._loader.state_after(batches)
        return {"streams": gather_objects(own_state) if world_size > 1 else [own_state]}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> None:
        """Resume after the samples that the checkpoint's run has consumed. :meth:`loader` raises if this is impossible."""
        streams = state["streams"]
        self._states = streams if any(stream["batches"] for stream in streams) else []

    def destroy_group(self) -> None:
        """Destroy the process group of the loader."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _sample_cost_fn(lengths: Any, cost: Any) -> Callable[[Any], float]:
    if lengths is None and cost is None:
        raise ValueError(
            "FreeScaleDataModule(lengths=None) cannot balance a stream. Pass lengths=, a function from a sample to its history "
            "length, or cost=, a function from a sample to its cost"
        )
    for name, value in (("lengths", lengths), ("cost", cost)):
        if value is not None and not callable(value):
            raise ValueError(
                f"FreeScaleDataModule({name}={type(value).__name__}): samples of a stream are unknown before the fit. Pass a "
                "function, or a map-style data set"
            )
    return partial(_cost_of_sample, lengths, cost or CostModel())  # no lambda, because Lightning may pickle the data module


def _cost_of_sample(lengths: Callable[[Any], float] | None, cost: Callable[[Any], Any], sample: Any) -> float:
    return float(cost(sample if lengths is None else lengths(sample)))
