"""The location of a thread in the code, in lines that the author of the training script knows."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

_PYTHON, _OURS = os.path.dirname(os.__file__) + os.sep, str(Path(__file__).parents[1]) + os.sep
_PACKAGES = f"{os.sep}site-packages{os.sep}"


def place_in_code(stack: traceback.StackSummary) -> str:
    """Return the innermost line outside the standard library, and the innermost line of the user's code."""
    known = [at for at in stack if not at.filename.startswith(_PYTHON) or _PACKAGES in at.filename]
    own = users_line(stack)
    lines = [f"{at.name} ({os.path.basename(at.filename)}:{at.lineno})" for at in (*known[-1:], own) if at is not None]
    return " < ".join(dict.fromkeys(lines))


def users_line(stack: traceback.StackSummary) -> traceback.FrameSummary | None:
    """Return the innermost line of code that belongs to no installed package; None if there is none."""
    known = [at for at in stack if not at.filename.startswith(_PYTHON) and _PACKAGES not in at.filename]
    own = [at for at in known if not at.filename.startswith((_OURS, "<frozen"))]
    return own[-1] if own else None
