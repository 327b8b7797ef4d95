"""What stands around the excerpts of a page, so that they run: one script for each page, which runs its blocks in their order.

A script runs in a folder that has the quick start's files. ``python -m tests.docs.excerpts.balance`` runs one by hand.
"""

from __future__ import annotations

import subprocess
from typing import Any

from tests.docs.pages import ROOT, blocks


class Excerpts:
    """The blocks of code of a page, each taken once; ``page`` is its path in the repository."""

    def __init__(self, page: str) -> None:
        self.page = page
        self._left = [block for block in blocks(ROOT / page) if block.language not in ("", "text")]

    def text(self, language: str) -> str:
        assert self._left, f"{self.page} has no more blocks of code: take its last line out of the script"
        block = self._left.pop(0)
        assert block.language == language, f"{self.page}: the next block is {block.language}, not {language}:\n{block.text}"
        return block.text

    def python(self, names: dict[str, Any], **other: str) -> None:
        """Run the next block among ``names``, with some of its words replaced: ``devices="2"`` for its ``devices=8``."""
        text = self.text("python")
        for name, value in other.items():
            before, text = text, text.replace(f"{name}=8", f"{name}={value}")
            assert text != before, f"{self.page}: nothing to replace of {name}"
        exec(compile(text, self.page, "exec"), names)

    def bash(self) -> str:
        return shell(self.text("bash"))

    def end(self) -> None:
        left = "\n".join(block.text for block in self._left)
        assert not left, f"{self.page}: nobody runs these blocks:\n{left}"
        print("every block was run:", self.page)


def shell(commands: str) -> str:
    """Run commands of bash here, the first that fails ending them; what they print, errors as well."""
    command = ["bash", "-euo", "pipefail", "-c", commands]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
    assert found.returncode == 0, f"{commands}\n{found.stdout[-6000:]}"
    return found.stdout


def made(commands: str) -> None:
    """Commands of make are there: what they would do is run by other tests, and some by this one's caller."""
    for line in commands.splitlines():
        shell(f"make --dry-run --directory {ROOT} {line.split('#')[0].removeprefix('make ')}")
