"""Scripts that run the excerpts of a page in their order, with the code that they need around them.

A script runs in a folder with the files of the quick start. ``python -m tests.docs.excerpts.balance`` runs one by hand.
"""

from __future__ import annotations

import subprocess
from typing import Any

from tests.docs.pages import ROOT, blocks


class Excerpts:
    """The code blocks of a page, each used once; ``page`` is its path in the repository."""

    def __init__(self, page: str) -> None:
        self.page = page
        self._left = [block for block in blocks(ROOT / page) if block.language not in ("", "text")]

    def text(self, language: str) -> str:
        assert self._left, f"{self.page} has no more code blocks; remove the last line of the script"
        block = self._left.pop(0)
        assert block.language == language, f"{self.page}: the next block is {block.language}, not {language}:\n{block.text}"
        return block.text

    def python(self, names: dict[str, Any], **other: str) -> None:
        """Run the next block with ``names``; ``devices="2"`` replaces ``devices=8`` in it."""
        text = self.text("python")
        for name, value in other.items():
            before, text = text, text.replace(f"{name}=8", f"{name}={value}")
            assert text != before, f"{self.page}: the block does not contain {name}=8"
        exec(compile(text, self.page, "exec"), names)

    def bash(self) -> str:
        return shell(self.text("bash"))

    def end(self) -> None:
        left = "\n".join(block.text for block in self._left)
        assert not left, f"{self.page}: these blocks were not run:\n{left}"
        print("every block was run:", self.page)


def shell(commands: str) -> str:
    """Run bash commands until one fails, and return their output and errors."""
    command = ["bash", "-euo", "pipefail", "-c", commands]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
    assert found.returncode == 0, f"{commands}\n{found.stdout[-6000:]}"
    return found.stdout


def made(commands: str) -> None:
    """Check that make knows the targets; other tests run them."""
    for line in commands.splitlines():
        shell(f"make --dry-run --directory {ROOT} {line.split('#')[0].removeprefix('make ')}")
