"""An HTML page on which every assumption of a prediction can be changed.

Python draws and assigns the samples. The browser computes the steps by the same formulas.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, fields
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from lightning_freescale.balance.validation import Floats
from lightning_freescale.simulator.network import Network
from lightning_freescale.simulator.outlook import LABELS, pairs_of_steps
from lightning_freescale.simulator.quantity import quantities
from lightning_freescale.simulator.training_step import TrainingLoad

_PAIRS = 2
_CONSTANTS = ("row_bytes", "overlap_calls", "backward", "ranks_per_node")


def write_page(
    path: Path,
    lengths: Floats,
    ranks: Sequence[int],
    load: TrainingLoad,
    network: Network,
    source: str,
    *,
    seed: int = 0,
) -> Path:
    """Write a page with a slider for each quantity and a switch for each technique, and return its path.

    The page loads no other files. The assignment of the samples depends on ``load`` and stays when the sliders change the ratio
    of the costs. ``source`` is a text about the origin of the lengths. See :func:`simulate` for the other arguments.
    """
    known = {**quantities(load), **quantities(network)}
    constants = {each.name: getattr(of, each.name) for of in (load, network) for each in fields(of) if each.name in _CONSTANTS}
    content = {
        "source": source,
        "ranks": [_sums(lengths, count, load, seed) for count in ranks],
        "known": [{"name": name, "label": LABELS[name], **asdict(each)} for name, each in known.items() if each.high > 0],
        "values": {name: each.value for name, each in known.items()},
        "fixed": constants,
        "edges": load.catalogue.edges.tolist(),
    }
    script = f'"use strict";\n(() => {{\n{_read("step.js")}{_read("page.js")}}})();'
    page = Template(_read("page.html")).substitute(
        style=_read("page.css"),
        policy=f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'",
        content=json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=script,
    )
    path.write_text(page, encoding="utf-8")
    return path


def _sums(lengths: Floats, ranks: int, load: TrainingLoad, seed: int) -> dict[str, Any]:
    """Return the sums of 1, L and L² over each rank's samples for some steps."""
    pairs = list(pairs_of_steps(lengths, ranks, load, 2 * _PAIRS, seed, resample=False))
    drawn, balanced = (np.concatenate([pair[each] for pair in pairs]).tolist() for each in (False, True))
    return {"count": ranks, "drawn": drawn, "balanced": balanced}


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
