"""A fixture for commands that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_freescale.command_line.main import main


@pytest.fixture
def fails(capsys: Any) -> Callable[..., str]:
    """Return a function that runs a command, which must exit with 2, and returns its error message."""

    def run(*words: Any) -> str:
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, words)])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return run
