"""``freescale explain MESSAGE``: print the section of the documentation about an error or a warning."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
SECTIONS = {  # module or package, the more specific one first: heading in docs/limits.md
    "strategy/checkpoint": "Checkpoints",
    "fabric/": "Fabric",
    "embeddings/catalogue": "Weights of sharded tables",
    "embeddings/id_checks": "Ids and lookups",
    "embeddings/plain_embedding": "Weights of sharded tables",
    "embeddings/overlap/hot_route": "Trainer and strategy",
    "embeddings/overlap/split_backward": "Trainer and strategy",
    "embeddings/overlap/": "Ids and lookups",
    "embeddings/": "Tables, plans and optimizers",
    "_torchrec": "Tables, plans and optimizers",
    "losses/": "Weights of sharded tables",
    "comm/rank_notices": "Ranks that differ",
    "_runtime/": "Ranks that differ",
    "comm/": "Process groups",
    "testing": "Process groups",
    "data/streaming/": "Streams",
    "data/interactions": "Interactions and Parquet files",
    "data/sources": "Interactions and Parquet files",
    "data/text_format": "Interactions and Parquet files",
    "data/parquet": "Interactions and Parquet files",
    "data": "Data module",
    "balance/": "Data module",
    "checkpoint/": "Checkpoints",
    "command_line/checkpoints": "Checkpoints",
    "command_line/profile": "Profiler and simulator",
    "profiling/": "Profiler and simulator",
    "callbacks/": "Profiler and simulator",
    "simulator/": "Profiler and simulator",
    "": "Trainer and strategy",
}
LEAST = 8
"""The number of constant characters that identify a message."""


def run(command: str, arguments: list[str]) -> None:
    """Run the command; exit with status 2 if no message of the package begins with the argument."""
    parser = argparse.ArgumentParser(prog=f"freescale {command}", description=__doc__, allow_abbrev=False)
    parser.add_argument("message", help="an error or warning of this package, or its beginning, in quotation marks")
    options = parser.parse_args(arguments)
    message = re.sub(r"^[\w.]*(Error|Exception|Warning): ", "", " ".join(options.message.split()))
    module = find_module(message)
    if module is None:
        parser.exit(2, f"freescale {command}: no message of this package begins with {message!r}\n")
    print(f"lightning_freescale/{module}\n\n{section(module)}")


def find_module(message: str) -> str | None:
    """Return the path of the module with the message, relative to the package; None if there is none."""
    found = (
        (_shared(message, parts), str(path.relative_to(PACKAGE)))
        for path in sorted(PACKAGE.rglob("*.py"))
        for parts in _templates(path)
    )
    length, module = max(found, key=lambda one: one[0])
    return module if message and length >= min(LEAST, len(message)) else None


def section(module: str) -> str:
    """Return the section of docs/limits.md about a module, without the characters of Markdown's links."""
    heading = next(name for prefix, name in SECTIONS.items() if module.startswith(prefix))
    page = PACKAGE / "limits.md"  # the wheel has it there
    text = (page if page.exists() else PACKAGE.parent / "docs" / "limits.md").read_text()
    body = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0].strip()
    return f"{heading}\n\n" + re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", body)


def _templates(path: Path) -> Iterator[list[str]]:
    """Yield the constant parts of each string of a module, between the values that an f-string fills in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [""]
            for value in node.values:
                if isinstance(value, ast.Constant):
                    parts[-1] += str(value.value)
                else:
                    parts.append("")
            yield parts
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield [node.value]


def _shared(message: str, parts: list[str]) -> int:
    """Return the number of constant characters of a template that the message matches in order; 0 if the beginnings differ."""
    if not message.startswith(parts[0]):
        return len(message) if parts[0].startswith(message) else 0
    place = shared = len(parts[0])
    for part in parts[1:]:
        at = message.find(part, place)
        if at < 0:  # the message may end inside of this part
            return shared + next((n for n in range(len(part), 0, -1) if message.endswith(part[:n])), 0)
        place, shared = at + len(part), shared + len(part)
    return shared
