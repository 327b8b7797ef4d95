"""Two processes on one device: the transports against gloo, training under the strategy, and a killed rank.

Two ranks exchange bytes of several sizes by each available transport. The received bytes must equal those of gloo, and the
rates are reported. Then rank 1 is killed during exchanges, and rank 0 must end with an error within the group's timeout.

If TorchRec and Lightning are installed, training is tested too: two nodes of one device each, with a sharded ``nn.Embedding``,
against the unsharded module under ``"ddp"``, with a pairwise loss and with a softmax over all rows. A rank is killed in a step.

The most important transports run first, and ``peer`` runs last, because a mistake in it could make the GPU unusable for the
others. If a later transport needs the time, training with transports other than ``host`` is skipped and listed.

The process groups need torch alone. Without a GPU the part runs with small sizes on the CPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[depth]) for depth in range(3)]

import hour_report
import torch
import two_ranks_lanes
import two_ranks_pair
from two_ranks_pair import Rank

TRANSPORTS = ("host", "native", "nccl-zero-cta", "peer")
GROUP_TIMEOUT = 10.0  # seconds within which a rank must notice that the other one has ended
LANE = 45.0  # seconds that the exchanges of one transport may take
TRAINING = 45.0  # seconds that training by one transport may take
LOADING = 30.0  # seconds more for the first training: two processes load TorchRec and FBGEMM from a cold disk
SECONDS = 190.0  # of all; the driver ends this part 20 s later, since torch's import from a cold disk takes time too


def main(arguments: Sequence[str] | None = None) -> None:
    deadline = time.monotonic() + SECONDS
    options = hour_report.options(__doc__, arguments)
    report = hour_report.Report("two_ranks", options.out)
    on_gpu = torch.cuda.is_available()
    sizes = two_ranks_lanes.of_size(on_gpu, options.quick)
    had = []
    for transport in TRANSPORTS:
        if reason := two_ranks_pair.lacking(transport):
            report.skip(f"{transport}, with and without the strategy", reason)
        else:
            had.append(transport)
    measure(report, had, sizes, on_gpu, deadline)
    report.skip("two-level", "it requires several hosts")
    report.end()


def measure(report: hour_report.Report, had: list[str], sizes: two_ranks_lanes.Sizes, on_gpu: bool, deadline: float) -> None:
    """Measure exchanges by the transports ``had``, in this order, and training while there is time until ``deadline``."""
    missing = [name for name in ("lightning", "torchrec", "fbgemm_gpu") if find_spec(name) is None]
    for place, transport in enumerate(had):
        later = LANE * len(had[place + 1 :])
        report.take(transport, _run(min(LANE, deadline - time.monotonic()), two_ranks_lanes.lane, transport, sizes))
        left = deadline - time.monotonic()
        under = f"{transport} under the strategy"
        if missing:
            report.skip(under, f"{', '.join(missing)}: not installed")
        elif place == 0:
            _train_by(report, transport, min(TRAINING + LOADING, left))
        elif not on_gpu:
            report.skip(under, "no CUDA device; one transport is enough to test the part")
        elif left < TRAINING + later:
            report.skip(under, f"only {left:.0f} s were left: it may take {TRAINING:g} s, and later transports {later:g} s")
        else:
            _train_by(report, transport, TRAINING)


def _train_by(report: hour_report.Report, transport: str, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report.take(f"{transport} under the strategy", _run(seconds, _train, transport, Path(folder)))


def _run(seconds: float, work: Callable[..., None], *args: Any) -> Iterator[Any]:
    return two_ranks_pair.run(work, *args, timeout=seconds, group_timeout=GROUP_TIMEOUT)


def _train(rank: Rank, transport: str, folder: Path) -> None:
    import two_ranks_training  # imports Lightning and TorchRec

    two_ranks_training.train(rank, transport, folder)


if __name__ == "__main__":
    main()
