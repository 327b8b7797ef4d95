"""Two processes on one device: the transports against gloo, training under the strategy, and a rank that is killed.

By every transport that can be had, two ranks exchange bytes of several sizes, which must be those that gloo moves; rates stand
beside them. Then rank 1 is killed in the midst of exchanges, and rank 0 must end with an error within the group's timeout.

Where TorchRec and Lightning are installed, the same is done in training: two nodes of one device each, with a sharded
``nn.Embedding``, against the unsharded module under ``"ddp"``; and a rank is killed in a step.

The process groups need torch alone. Without a GPU it runs in small sizes on the CPU. Not tested on GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[depth]) for depth in range(3)]

import part_report
import rank_pair
import torch
import two_ranks_lanes
from rank_pair import Rank

TRANSPORTS = ("host", "peer", "native", "nccl-zero-cta")
GROUP_TIMEOUT = 10.0  # seconds after which a rank must have noticed that the other is gone
SECONDS = 90.0  # that two processes may take


def main(arguments: Sequence[str] | None = None) -> None:
    options = part_report.options(__doc__, arguments)
    report = part_report.Report("two_ranks", options.out)
    on_gpu = torch.cuda.is_available()
    sizes = two_ranks_lanes.of_size(on_gpu, options.quick)
    had = []
    for transport in TRANSPORTS:
        if reason := rank_pair.lacking(transport):
            report.skip(f"{transport}, with and without the strategy", reason)
        else:
            report.take(transport, _run(two_ranks_lanes.lane, transport, sizes))
            had.append(transport)
    report.skip("two-level", "it is for several hosts")
    missing = [name for name in ("lightning", "torchrec", "fbgemm_gpu") if find_spec(name) is None]
    for transport in had if on_gpu else ["host"]:  # one is enough to see that the part itself works
        if missing:
            report.skip(f"{transport} under the strategy", f"{', '.join(missing)}: not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            report.take(f"{transport} under the strategy", _run(_train, transport, Path(folder)))
    report.end()


def _run(work: Callable[..., None], *args: Any) -> Iterator[Any]:
    return rank_pair.run(work, *args, timeout=SECONDS, group_timeout=GROUP_TIMEOUT)


def _train(rank: Rank, transport: str, folder: Path) -> None:
    import two_ranks_training  # imports Lightning and TorchRec

    two_ranks_training.train(rank, transport, folder)


if __name__ == "__main__":
    main()
