"""Error texts that ranks exchange can be encoded, are short, and have one line."""

from __future__ import annotations

import pytest

from lightning_freescale._runtime.error_text import error_text


class NoTextError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("\udcff lone"), r"ValueError: \udcff lone"),
        (KeyError("key"), "KeyError: 'key'"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RuntimeError("first\n\tsecond\n"), "RuntimeError: first second"),
        (NoTextError(), "NoTextError: its text cannot be computed"),
    ],
)
def test_any_error_has_a_text(error: BaseException, text: str) -> None:
    assert error_text(error) == text


def test_a_long_text_keeps_both_ends() -> None:
    text = error_text(OSError("begins " + "x" * 5_000_000 + " ends"))
    assert text.startswith("OSError: begins") and text.endswith("x ends") and "characters" in text and len(text) < 5000
