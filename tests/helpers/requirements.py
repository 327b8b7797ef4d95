"""What pyproject.toml asks for."""

from __future__ import annotations

import ast
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def requirements_in_pyproject(key: str) -> list[Requirement]:
    """The list of that name; the file is read as text, for Python 3.10 has no reader of TOML."""
    text = PYPROJECT.read_text().split(f"\n{key} = [")[1]
    one_line = text.split("\n")[0]
    listed = one_line if one_line.endswith("]") else text.split("\n]")[0] + "]"
    return [Requirement(one) for one in ast.literal_eval("[" + listed)]
