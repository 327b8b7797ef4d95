"""What a report states of a run."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

import lightning_freescale
from lightning_freescale.profiling.reporting import facts


def test_versions_of_a_checkout_that_was_never_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_others(name: str) -> str:
        if name.replace("-", "_") == "lightning_freescale":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(facts, "version", only_others)
    found = facts.RunInfo("a", "Model", 1, 1).versions
    assert found["lightning_freescale"] == lightning_freescale.__version__
    assert found["torch"] == version("torch") and found["lightning"] == version("lightning")
