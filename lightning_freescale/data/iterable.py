"""Training data that arrives sample by sample: every rank has a stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from lightning_freescale.balance import Assignment, CostModel, assign
from lightning_freescale.balance.assign import assignment_bound, contiguous_split, imbalance
from lightning_freescale.comm import BACKEND, LaneOptions
from lightning_freescale.data.streaming import BalancedStreamLoader
from lightning_freescale.data.validation import refuse_unused, stream_weight

_POOL: dict[str, Any] = {"pool_batches": 8, "max_age": 32}
_OTHERS: dict[str, Any] = {
    "calibrate": False,
    "unique_ids": None,
    "max_tokens_per_rank": None,
    "tokens": None,
    "keep_together": None,
    "outlier_window": 1,
    "shuffle": True,
    "seed": 0,
    "pin_memory": False,
    "persistent_workers": False,
}
"""Arguments of the data module that mean nothing for streams, with their defaults."""


class IterableData:
    """An iterable data set, what its samples cost, and how the ranks share them.

    Args:
        dataset: this rank's stream.
        length: history length of a sample.
        cost: a function of the length, or without ``length`` of the sample.
        assign_options: ``assignment_mode``, ``count_slack``, ``rank_speeds`` of :func:`assign`, for ``exchange="samples"``.
        loader_options: further arguments of :class:`BalancedStreamLoader`.

    Raises:
        ValueError: there is nothing to tell the costs from.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        length: Callable[[Any], float] | None,
        cost: Callable[[Any], Any] | None,
        *,
        assign_options: dict[str, Any],
        loader_options: dict[str, Any],
    ) -> None:
        self.dataset = dataset
        self._options = {"assign": partial(assign, **assign_options), **loader_options, "cost": _cost_of(length, cost)}
        self._group: dist.ProcessGroup | None = None
        self.forget()
        BalancedStreamLoader(dataset, **self._options)  # what does not fit is refused now
        assign([1.0], 1, **{**assign_options, "rank_speeds": None})

    @classmethod
    def of(cls, dataset: IterableDataset[Any], given: Mapping[str, Any]) -> IterableData:
        """From the arguments of :class:`FreeScaleDataModule` by name.

        Raises:
            ValueError: one does not fit, or would have no effect.
        """
        refuse_unused("an IterableDataset, whose samples are not known before they arrive", given, **_OTHERS)
        exchange, balance = given["exchange"], given["balance"]
        if exchange == "none" or not balance:
            what = "exchange='none', where every rank keeps equal counts" if balance else "balance=False"
            refuse_unused(what, given, mode="fixed", count_slack=0.25, rank_speeds=None)
        if exchange == "samples" or not balance:
            refuse_unused("streams without a pool (exchange='samples', or balance=False)", given, **_POOL)
        if given["mode"] != "slack":
            refuse_unused(f"mode={given['mode']!r}", given, count_slack=0.25)
        options = {name: given[name] for name in ("batch_size", "exchange", "drop_last", "collate_fn", "num_workers", *_POOL)}
        options["weight"] = stream_weight(given["loss_reduction"], given["lengths"], given["targets"])
        options["summed"] = given["loss_reduction"] == "sum"
        if not balance:
            options |= {"assign": _as_drawn, "pool_batches": 1}
        assign_options = {"assignment_mode": given["mode"], **{name: given[name] for name in ("count_slack", "rank_speeds")}}
        return cls(dataset, given["lengths"], given["cost"], assign_options=assign_options, loader_options=options)

    def forget(self) -> None:
        """A new fit starts at the beginning, also after one that failed."""
        self.close()
        self._state: dict[str, Any] | None = None
        self._loader: BalancedStreamLoader | None = None

    def loader(self, rank: int, world_size: int, epoch: int = 0, timeout: timedelta | None = None) -> BalancedStreamLoader:
        """The loader of a rank, from where a checkpoint left it on. Collective."""
        if world_size > 1 and self._group is None:
            # its own lane: its thread must not queue behind training's collectives, which come first
            self._group = dist.new_group(backend=BACKEND, timeout=timeout, pg_options=LaneOptions(name="samples", priority=-1))
        loader = BalancedStreamLoader(self.dataset, rank=rank, world_size=world_size, group=self._group, **self._options)
        if self._state is not None:
            loader.load_state_dict(self._state)
        loader.set_epoch(epoch)
        self._loader = loader
        return loader

    def state_dict(self, epoch: int, batches: int, world_size: int) -> dict[str, Any]:
        """After ``batches`` steps of ``epoch``: all ranks' states, on every rank. Collective."""
        if self._loader is None:  # nothing of the epoch was read
            return {"streams": [{"epoch": epoch, "batches": 0, "stream": None}] * world_size}
        self._loader.set_epoch(epoch)
        mine = self._loader.state_after(batches)
        states: list[Any] = [mine] * world_size
        if world_size > 1:
            dist.all_gather_object(states, mine)
        return {"streams": states}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> None:
        """Go on after the samples that the checkpoint's run has consumed.

        Raises:
            ValueError: it had another number of streams, inside an epoch, or is of another kind of data.
        """
        if "streams" not in state:
            raise ValueError(
                "the checkpoint was made with a map-style data set, this run has an IterableDataset: its place in the one "
                "means nothing in the other. Load the weights alone, or use the same kind of data set"
            )
        streams = state["streams"]
        inside = any(stream["batches"] for stream in streams)
        if inside and len(streams) != world_size:
            raise ValueError(
                f"the checkpoint stopped inside an epoch of {len(streams)} streams, this run has {world_size} ranks: samples "
                f"would be lost or repeated. Resume on {len(streams)} ranks, or from a checkpoint made at the end of an epoch"
            )
        self._state = streams[rank] if inside else None

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _as_drawn(costs: NDArray[np.float64], ranks: int) -> Assignment:
    """What the ranks read, in runs: they keep their own samples, and share what is left at the end."""
    split = contiguous_split(len(costs), ranks)
    bound, dominated = assignment_bound(costs, ranks)
    return Assignment(split, imbalance(costs, split, ranks), bound, None, dominated)


def _cost_of(length: Callable[[Any], float] | None, cost: Callable[[Any], Any] | None) -> Callable[[Any], float]:
    if length is None and cost is None:
        raise ValueError(
            "FreeScaleDataModule(lengths=None) cannot balance a stream: pass lengths=, a function from a sample to its history "
            "length, or cost=, a function from a sample to its cost"
        )
    for name, value in (("lengths", length), ("cost", cost)):
        if value is not None and not callable(value):
            raise ValueError(
                f"FreeScaleDataModule({name}={type(value).__name__}): samples of a stream are not known before; pass a function"
            )
    return partial(_of_sample, length, cost)


def _of_sample(length: Callable[[Any], float] | None, cost: Callable[[Any], Any] | None, sample: Any) -> float:
    if length is None:
        assert cost is not None
        return float(cost(sample))
    return float((cost or CostModel())(length(sample)))
