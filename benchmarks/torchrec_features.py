"""Features of TorchRec under strategy "freescale", on 2 ranks: equal to "ddp" or plain TorchRec, or refused by an error.

The cases are those of tests/parity/test_torchrec_features.py. ``python benchmarks/torchrec_features.py --only data_parallel``
runs the features whose names contain a text.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parents[1]))

import harness

from tests.helpers.torchrec_features import TABLE_FEATURES, Feature, outcome
from tests.helpers.torchrec_modules import MODULE_FEATURES

FEATURES: dict[str, Feature] = {**TABLE_FEATURES, **MODULE_FEATURES}


def main() -> None:
    """Fit every feature, and print its outcome."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="features whose names contain TEXT (default: all)")
    options = parser.parse_args()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found = {}
    for name in (name for name in FEATURES if options.only in name):
        found[name] = outcome(FEATURES[name]).replace("|", "\\|")
        print(f"{name}: {found[name]}", flush=True)
    counts = {kind: sum(each.startswith(kind) for each in found.values()) for kind in ("equal", "refused", "different")}
    figures: dict[str, Any] = {**counts, **found}
    harness.finish(figures, options)


if __name__ == "__main__":
    main()
