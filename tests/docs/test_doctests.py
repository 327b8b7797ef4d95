"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

from tests.docs.pages import ROOT

WITH_EXAMPLES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in (ROOT / "lightning_freescale").rglob("*.py")
    if ">>>" in file.read_text()
)


def test_there_are_examples() -> None:
    assert "lightning_freescale.balance.assign" in WITH_EXAMPLES


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_give_what_they_say(module: str) -> None:
    result = doctest.testmod(import_module(module))
    assert result.attempted and not result.failed
