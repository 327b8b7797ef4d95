"""List violations of the style rules in CONTRIBUTING.md: ``python scripts/plain_english.py PATH ...``.

It prints a line for each violation and exits with 1 if there is one. A folder means its Python and Markdown files. The rules:

- no text contains a word of ``WORDS``;
- a docstring begins with its subject, a function's with a verb in the imperative, a property's with a noun phrase;
- the sentences of a page or module have at most 25 words on average.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

WORDS = re.compile(
    r"\b(nobody|somebody|whoever|anybody|told|com(?:e|es|ing) by|came by|of which|whatever|thereof|gone|stands|rooms?|houses?"
    r"|way out|by the way|lest|wherefore|therein|therefrom)\b",
    re.IGNORECASE,
)
ELLIPTICAL = {"What", "How", "Which", "Where", "Of", "That", "Who", "Whom", "Whose", "By", "So"}
"""First words that name no subject."""
NO_VERB = {
    "The",
    "A",
    "An",
    "All",
    "Its",
    "This",
    "These",
    "Those",
    "No",
    "One",
    "Each",
    "Every",
    "Whether",
    "Some",
    "It",
    "If",
}
"""First words of a function's docstring that are no verb in the imperative."""
THIRD_PERSON = {"Returns", "Makes", "Takes", "Gives", "Yields", "Raises", "Sets", "Gets", "Writes", "Reads", "Sends", "Runs"}
VERBS = {"Return", "Get", "Compute", "Yield", "Give"}
"""First words of a property's docstring that make it a function's."""
LONGEST_AVERAGE = 25.0


def violations(path: Path) -> Iterator[str]:
    """Yield a message for each violation in a file."""
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        for found in WORDS.finditer(line):
            yield f"{path}:{number}: avoid {found.group().lower()!r}"
    if path.suffix == ".py":
        docstrings = list(_docstrings(ast.parse(text)))
        for line_number, kind, docstring in docstrings:
            if message := _beginning(kind, docstring):
                yield f"{path}:{line_number}: {message}"
        prose = "\n\n".join(docstring for _, _, docstring in docstrings)
    else:
        prose = text
    average = words_per_sentence(prose)
    if average > LONGEST_AVERAGE:
        yield f"{path}:1: the sentences have {average:.1f} words on average; at most {LONGEST_AVERAGE:g} are allowed"


def words_per_sentence(text: str) -> float:
    """Return the average number of words of the sentences, without code blocks, tables, headings and short fragments."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(\||#|>>>|\.\.\.|::|!!!|\$)", line)]
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", "\n".join(lines))
    sentences = [one for paragraph in paragraphs for one in re.split(r"(?<=[.!?:;])\s+", paragraph.strip())]
    lengths = [len(one.split()) for one in sentences if len(one.split()) > 2]
    return sum(lengths) / len(lengths) if lengths else 0.0


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind (module, class, function or property) and text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            doc := ast.get_docstring(node)
        ):
            yield getattr(node, "lineno", 1), _kind(node), doc


def _kind(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    names = {getattr(one, "id", getattr(one, "attr", "")) for one in node.decorator_list}
    return "property" if names & {"property", "cached_property", "setter"} else "function"


def _beginning(kind: str, docstring: str) -> str | None:
    """Return the violation in the first words of a docstring; None if there is none."""
    words = re.findall(r"[\w'`]+", docstring)
    if not words:
        return None
    if words[0] in ELLIPTICAL or words[:2] == ["The", "same"]:
        return f"begin the docstring with its subject, not with {' '.join(words[:2])!r}"
    if kind == "function" and (words[0] in NO_VERB or words[0] in THIRD_PERSON):
        return f"begin the function's docstring with a verb in the imperative, not with {words[0]!r}"
    if kind == "property" and words[0] in VERBS:
        return f"begin the property's docstring with a noun phrase, not with {words[0]!r}"
    return None


def files(path: Path) -> list[Path]:
    """Return the file, or the Python and Markdown files of the folder."""
    return [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])


if __name__ == "__main__":
    messages = [message for path in sys.argv[1:] for file in files(Path(path)) for message in violations(file)]
    print(*messages, f"{len(messages)} found", sep="\n")
    sys.exit(bool(messages))
