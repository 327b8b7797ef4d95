"""Do models of other packages train sharded under "freescale" as unsharded under "ddp"? Those of tests/parity/third_party.

Prints, for each model and optimizer, the largest relative difference of a loss over 50 steps on 1, 2 and 3 ranks, and beside it
what rounding alone does: "ddp" against "ddp" from weights that differ in their last bit. Adam is compared with one that leaves
rows alone which no rank looks up; where the loss is a softmax over all rows, with Adam itself. ``make test-third-party``
installs the packages. No registry has that of HSTU, so HSTU only runs if it is named.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parents[1]))

import harness

from lightning_freescale.testing import run_distributed
from tests.parity.third_party.test_third_party import MODELS, model
from tests.parity.third_party.training import Fit, Training, fit, fit_both, largest_difference, reference, strategies

LAST_BIT = 2.0**-23


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=[name for name in MODELS if name != "HSTU"], choices=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adagrad", "adam"], choices=["sgd", "adagrad", "adam"])
    options = parser.parse_args()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    figures: dict[str, float] = {"largest": 0.0}
    print("| model | package | optimizer | " + " | ".join(f"ranks: {ranks}" for ranks in options.ranks) + " | rounding alone |")
    for name in options.models:
        kind, largest_alone = model(name), 0.0
        for optimizer in options.optimizers:
            found = [largest_difference(run_distributed(fit_both, ranks, kind, optimizer)) for ranks in options.ranks]
            figures |= {f"{name}, {optimizer}, {ranks} ranks": each for ranks, each in zip(options.ranks, found)}
            figures |= {f"{name}, {optimizer}": max(found), "largest": max(figures["largest"], *found)}
            alone = max(largest_difference(run_distributed(rounded, ranks, kind, optimizer)) for ranks in options.ranks)
            figures[f"{name}, {optimizer}, rounding alone"] = alone
            figures[f"{name}, rounding alone"] = largest_alone = max(largest_alone, alone)
            cells = [name, f"{kind.package} {_version(kind.package)}", optimizer, *(f"{each:.1e}" for each in (*found, alone))]
            print("| " + " | ".join(cells) + " |", flush=True)
    harness.finish(figures, options)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "from source"


def rounded(kind: type[Training], optimizer: str) -> list[Fit]:
    """Fit twice under "ddp", the second time from weights that differ in their last bit."""
    return [fit(kind, reference(kind, optimizer), strategies(kind)[0], rounding) for rounding in (0.0, LAST_BIT)]


if __name__ == "__main__":
    main()
