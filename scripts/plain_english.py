"""List words and beginnings that make a text hard to read: ``python scripts/plain_english.py PATH ...``.

It prints a line for each occurrence and exits with 1 if there is one. In a Python file it also checks the first word of the
module's docstring. A path may be a folder, whose Python and Markdown files are checked.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

WORDS = re.compile(
    r"\b(nobody|somebody|whoever|anybody|told|com(?:e|es|ing) by|came by|of which|whatever|thereof|gone|stands)\b",
    re.IGNORECASE,
)
BEGINNINGS = {"What", "How", "Which", "Where", "Of"}
"""First words of a module's docstring that name no subject."""


def violations(path: Path) -> Iterator[str]:
    """Yield a message for each word to avoid in a file, and for the beginning of a module's docstring."""
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        for found in WORDS.finditer(line):
            yield f"{path}:{number}: avoid {found.group().lower()!r}"
    if path.suffix == ".py" and (words := (ast.get_docstring(ast.parse(text)) or "").split()) and words[0] in BEGINNINGS:
        yield f"{path}:1: begin the docstring with its subject, not with {words[0]!r}"


def files(path: Path) -> list[Path]:
    """Return the file, or the Python and Markdown files of the folder."""
    return [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])


if __name__ == "__main__":
    messages = [message for path in sys.argv[1:] for file in files(Path(path)) for message in violations(file)]
    print(*messages, f"{len(messages)} found", sep="\n")
    sys.exit(bool(messages))
