"""Facts about a run that its report states beside the breakdown of its steps."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec

from lightning_freescale._version import __version__  # a checkout on the path has no metadata that would say it


def _installed() -> dict[str, str]:
    found = {name: version(name) for name in ("torch", "lightning") if find_spec(name) is not None}
    return {"lightning_freescale": __version__, **found, "python": platform.python_version()}


@dataclass(frozen=True)
class RunInfo:
    """What ran.

    ``label`` names the run in comparisons; ``started`` is a time in ISO 8601; ``versions`` are of packages; ``assignment`` is
    how samples were assigned to the ranks, None if nobody knows; ``overlap`` is whether rows are exchanged while the model
    computes, ``"on"``, ``"off"`` or, where it was asked for in vain, ``"impossible"``; None without sharded tables;
    ``num_workers`` are the loader's on a rank, None if nobody knows; ``sharded_tables`` is whether TorchRec shards tables, None
    if nobody knows.
    """

    label: str
    model: str
    parameters: int
    world_size: int
    strategy: str = "a plain loop"
    device: str = "cpu"
    accumulate_grad_batches: int = 1
    assignment: str | None = field(default=None, kw_only=True)
    overlap: str | None = field(default=None, kw_only=True)
    num_workers: int | None = field(default=None, kw_only=True)
    sharded_tables: bool | None = field(default=None, kw_only=True)
    started: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    versions: Mapping[str, str] = field(default_factory=_installed)


@dataclass(frozen=True)
class Status:
    """How much of the run the report covers.

    Attributes:
        complete: the run came to its end.
        reason: why it did not.
        warmup: first steps left out.
        not_exchanged: steps done whose records the ranks could not exchange any more.
    """

    complete: bool = True
    reason: str | None = None
    warmup: int = 0
    not_exchanged: int = 0


@dataclass(frozen=True)
class WaitAttribution:
    """Whether waits for peers were divided into straggler wait and transfer, by when the ranks arrived.

    Attributes:
        aligned: the ranks' clocks were aligned, so arrivals can be compared; also if there is one rank.
        uncertainty: how far the turn from straggler wait to transfer may be off, in seconds.
        reason: why the clocks are not aligned, and so waits not divided.
        clock: how well the ranks' clocks were compared, as in the document; None if they were not.
    """

    aligned: bool
    uncertainty: float
    reason: str | None = None
    clock: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Overhead:
    """What the profiler itself took, in seconds per step: the ranks' ``exchange`` of records, and ``stamps``."""

    exchange: float
    stamps: float

    @property
    def total(self) -> float:
        """Seconds per step of exchange and stamps together."""
        return self.exchange + self.stamps


@dataclass(frozen=True)
class ExchangeFigures:
    """The exchanges of one name, per step and as a mean over the ranks.

    Attributes:
        name: of the exchanges.
        per_step: how many a step has.
        straggler_wait: seconds waited for the last rank.
        transfer: seconds waited after that.
        hidden: seconds behind compute.
        moved: bytes that pass a rank's link; None if unknown.
        last: how often each rank was the last to arrive, over all steps.
        wait: seconds waited that could not be divided into the two.
    """

    name: str
    per_step: float
    straggler_wait: float
    transfer: float
    hidden: float
    moved: float | None
    last: tuple[int, ...]
    wait: float = 0.0
