"""Errors as texts that ranks can exchange."""

from __future__ import annotations

_MOST = 4000
"""The number of characters of a text, because every rank prints it."""


def error_text(error: BaseException) -> str:
    """Return the type and the text of an error, see :func:`sendable`."""
    return sendable(whole_text(error))


def whole_text(error: BaseException) -> str:
    """Return the type and the text of an error."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be computed"
    return f"{type(error).__name__}: {text}".strip(": ")


def sendable(text: str) -> str:
    """Return the text as one line of valid UTF-8, without the middle of a long text."""
    if len(text) > _MOST:
        text = f"{text[: _MOST // 2]} ... {len(text) - _MOST} characters ... {text[-_MOST // 2 :]}"
    text = text.encode(errors="backslashreplace").decode()
    return " ".join(line.strip() for line in text.splitlines())


def a(kind: type) -> str:
    """Return the name of a class with its article, such as "an EmbeddingBag"."""
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
