"""Measure a Lightning script that knows nothing of it: ``python -m lightning_freescale.profile train.py ...``.

The command leaves what it was told in an environment variable, which the ranks that the script starts inherit. Whenever a
Trainer is made, Lightning asks :func:`callbacks_of_run`, which is an entry point of this package, for callbacks to add.
"""

from __future__ import annotations

import json
import os
from typing import Any

VARIABLE = "LIGHTNING_FREESCALE_PROFILE"
"""Holds in JSON ``options`` of the BubbleProfiler and ``fits``, the file to which every rank adds its number in every fit."""


def callbacks_of_run() -> list[Any]:
    """Return the callback that profiles a fit if the command runs this script; nothing otherwise."""
    if VARIABLE not in os.environ:
        return []
    from lightning_freescale.callbacks.added_profiler import AddedProfiler

    return [AddedProfiler(**json.loads(os.environ[VARIABLE]))]


def refuse_other_trainer() -> list[Any]:
    """Refuse the Trainer of ``pytorch_lightning`` if the command runs this script: its callbacks are of other classes.

    Raises:
        ValueError: it does.
    """
    if VARIABLE in os.environ:
        raise ValueError(
            "the script makes a Trainer of pytorch_lightning, the bubble profiler is a callback of lightning.pytorch: "
            "import lightning.pytorch as pl, and nothing of pytorch_lightning"
        )
    return []
