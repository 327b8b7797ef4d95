"""The benchmarks for a GPU are scripts that import each other by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[2] / "benchmarks" / folder) for folder in ("", "gpu")]
