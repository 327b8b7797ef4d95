"""Load balanced batches from an iterable data set."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, default_collate

from lightning_freescale._runtime.worker import WorkerThread
from lightning_freescale.balance.assign import Assignment, assign
from lightning_freescale.balance.micro_batches import MicroBatchSchedule, cut
from lightning_freescale.balance.report import StepBalance
from lightning_freescale.balance.sampler import rank_loss_weight
from lightning_freescale.data.balanced_loader import collated
from lightning_freescale.data.streaming.reader import RemainingParts, StreamReader, StreamSource
from lightning_freescale.data.streaming.steps import AssignedSteps, StreamGroup, StreamStep

_END: Any = object()
_PREFETCHED = 2  # batches that are prepared ahead of the current step
_KNOWN_STEPS = 100
"""The number of steps whose descriptions are kept."""


@dataclass(eq=False)
class BalancedStreamLoader:
    """Yields the collated batches of one rank, so that the batches of all ranks in a step cost nearly the same.

    Every rank reads its own stream in a background thread. The samples that the ranks read at the same time are assigned as one
    global batch, and sent to the ranks that compute them. There is no previous pass over the data. All ranks perform the same
    number of steps.

    Iterate the loader once per epoch, on all ranks at the same time. The data set is read in the thread or in loader workers,
    so it must not draw from the global random state.

    Args:
        dataset: stream of this rank; see :class:`~lightning_freescale.data.streaming.reader.StreamSource` on workers and
            resuming.
        batch_size: samples per rank and step.
        cost_fn: predicted compute time of a sample, in any unit. It is called once per sample that a rank
            reads, and again for samples that a resumed run reads again.
        weight_fn: weight of a sample in the mean loss, called like ``cost_fn``. By default, every sample weighs 1.
        loss_is_sum: whether the loss of a rank is a sum over its samples instead of a mean.
        rank: this rank.
        world_size: number of ranks.
        group: process group of all ranks, of backend freescale or gloo, without other users; required for more than one rank.
            The loader does not destroy it.
        collate_fn: function from the list of samples of a step to a batch. Default: torch's ``default_collate``.
        num_workers: as in ``torch.utils.data.DataLoader``.
        drop_last: whether to drop the samples of an incomplete last step.
        assign_fn: function from the costs of a global batch and the number of ranks to an assignment.
        micro_batches: number of parts of each step; one by default. A step has fewer parts if a rank has fewer samples with a
            weight above 0.
    """

    dataset: IterableDataset[Any]
    batch_size: int
    _: KW_ONLY
    cost_fn: Callable[[Any], float]
    weight_fn: Callable[[Any], float] | None = None
    loss_is_sum: bool = False
    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    drop_last: bool = False
    assign_fn: Callable[[NDArray[np.float64], int], Assignment] = assign
    micro_batches: MicroBatchSchedule | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dataset, IterableDataset):
            given = type(self.dataset).__name__
            raise ValueError(f"BalancedStreamLoader(dataset={given}): the data set must be a torch.utils.data.IterableDataset")
        if self.batch_size < 1:
            raise ValueError(f"BalancedStreamLoader(batch_size={self.batch_size!r}): pass a number of samples of at least 1")
        if self.world_size > 1 and self.group is None:
            raise ValueError(
                f"BalancedStreamLoader(world_size={self.world_size}, group=None): pass a process group of all ranks"
            )
        self.num_replicas = self.world_size  # the name of the attribute in torch's samplers
        self.epoch = 0
        self._source = StreamSource(self.dataset, self.batch_size, self.num_workers)
        self._steps: dict[int, StreamStep] = {}
        self._resume: dict[str, Any] = {}

    @property
    def sampler(self) -> BalancedStreamLoader:
        """The loader itself, because the strategy reads the loss weights of steps from a loader's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        state = self._resume["stream"] if self._resume.get("epoch") == self.epoch else None
        self._steps = {}
        batches = self._make_batches(state)
        # a daemon thread, so that a rank can exit without waiting for ranks that have failed
        worker = WorkerThread("freescale-stream")
        # Making batches runs collectives. The number of batches made depends only on the number used. Ranks that use the same
        # number therefore run the same collectives, also if all of them stop early.
        pending = deque(worker.submit(next, batches, _END) for _ in range(_PREFETCHED))
        try:
            while (made := pending.popleft().result()) is not _END:
                pending.append(worker.submit(next, batches, _END))
                batch, step = made
                self._steps[step.step] = step
                self._steps.pop(step.step - _KNOWN_STEPS - _PREFETCHED, None)
                yield batch
        finally:
            worker.submit(batches.close)  # after the pending batches; the loader workers must end in the thread
            worker.stop()

    # -- descriptions of steps

    def counts(self, step: int) -> list[int]:
        """Return the number of samples of every rank in a step of this epoch, as a list of ``world_size`` integers."""
        return self._step(step).counts

    def costs(self, step: int) -> NDArray[np.float64]:
        """Return the cost of every rank's batch in a step, shape ``[ranks]``."""
        return self._step(step).costs

    def loss_weight(self, step: int) -> float:
        """Return the factor for this rank's loss with which the mean over ranks is the mean (or sum) over the global batch."""
        weights = self._step(step).weights
        return float(self.world_size) if self.loss_is_sum else rank_loss_weight(weights.tolist(), self.rank)

    def balance(self, step: int) -> StepBalance:
        """Return the imbalance of a step with and without the assignment."""
        return self._step(step).balance

    def _step(self, step: int) -> StreamStep:
        if step not in self._steps:
            known = f"{min(self._steps)} to {max(self._steps)}" if self._steps else "none"
            raise ValueError(f"step={step} of this epoch is unknown. The known steps, which were loaded last, are: {known}")
        return self._steps[step]

    # -- resume

    def state_after(self, batches: int) -> dict[str, Any]:
        """Return the state of this rank's stream after a number of batches of the epoch, in plain values.

        Raises:
            ValueError: the state is no longer kept, or the batches were not loaded yet.
        """
        if (self._resume.get("epoch"), self._resume.get("batches")) == (self.epoch, batches):
            return self._resume
        stream = self._step(batches - 1).state if batches else None
        parts = self._resume["parts"] if "parts" in self._resume and self._resume["epoch"] == self.epoch else None
        read_on = {} if parts is None else {"parts": parts}
        return {"epoch": self.epoch, "batches": batches, "stream": stream, **read_on, **self._steps_depend_on()}

    def read_on(self, states: list[dict[str, Any]]) -> None:
        """Resume from the states of another number of ranks. This rank reads the rest of some of their streams.

        Raises:
            ValueError: the data set cannot return the stream of another rank.
        """
        ranks = f"the checkpoint stopped inside an epoch of {len(states)} streams, this run has {self.world_size} ranks"
        fix = f"Resume on {len(states)} ranks, or from a checkpoint of the end of an epoch"
        if not hasattr(self.dataset, "for_rank"):
            name = type(self.dataset).__name__
            raise ValueError(
                f"{ranks}. To continue, implement {name}.for_rank(rank, world_size), which returns the data set of another "
                f"rank. {fix}"
            )
        if any("parts" in state for state in states):
            raise ValueError(f"{ranks}, but this epoch was already resumed on another number of ranks. {fix}")
        parts = [
            {"rank": rank, "world_size": len(states), "reader": states[rank]["stream"]["reader"]}
            for rank in range(self.rank, len(states), self.world_size)
        ]
        start = {"place": RemainingParts(self._source, parts).first_place(), "first": 0, "held": [], "read": 0}
        batches = states[0]["batches"]
        stream = {"reader": start, "first_round": 0, "rounds": [], "step": batches}
        self._resume = {"epoch": states[0]["epoch"], "batches": batches, "stream": stream, "parts": parts}
        self._resume |= self._steps_depend_on()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the state's epoch after its batches; all other epochs start at the beginning.

        Raises:
            ValueError: the state belongs to another rank, or to a loader with other steps.
        """
        for name, value in self._steps_depend_on().items():
            if state["stream"] is not None and state[name] != value:
                raise ValueError(
                    f"the checkpoint stopped inside an epoch with {name}={state[name]!r}, but this loader has "
                    f"{name}={value!r}. "
                    f"Samples would be lost or repeated. Pass the previous {name}, or resume from the end of an epoch"
                )
        self._resume = state

    def _steps_depend_on(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("rank", "batch_size", "drop_last", "world_size", "num_workers")}

    # -- the thread

    def _make_batches(self, state: dict[str, Any] | None) -> Generator[tuple[Any, StreamStep], None, None]:
        """Start the workers in this thread, and make the batches in the thread that iterates the result."""
        # not drawn from the global random state, from which a run that resumes inside an epoch would draw once more
        seed = torch.initial_seed() + 1_000_003 * self.epoch + self.rank
        source: StreamSource | RemainingParts = self._source
        if state is not None and "parts" in self._resume:
            source = RemainingParts(self._source, self._resume["parts"])
        reader = StreamReader(source, self.cost_fn, self.weight_fn, self.epoch, seed, state and state["reader"])
        group = StreamGroup(self.rank, self.world_size, self.group if self.world_size > 1 else None, 1 + 2 * self.batch_size)
        steps = AssignedSteps(reader, group, self.batch_size, self.assign_fn, self.drop_last, state)
        return group.report_failure(self._collate(reader, steps))

    def _collate(self, reader: StreamReader, steps: AssignedSteps) -> Iterator[tuple[Any, StreamStep]]:
        collate = self.collate_fn or default_collate
        try:
            for samples, (costs, weights), step in steps:
                schedule = self.micro_batches
                parts = 1 if schedule is None else min(schedule.count(self.epoch, step.step), *step.most_parts)
                divided = samples if parts == 1 else cut(samples, parts, costs, weights, loss_is_sum=self.loss_is_sum)
                yield collated(collate, divided), step
        finally:
            reader.stop_workers()
