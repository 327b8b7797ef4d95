"""A hook of MkDocs that copies linked files outside docs/ to the site and changes the links to the copies.

The links of the pages therefore also work in a view of the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from posixpath import dirname, relpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
_COPIES = "repository"
_LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[)#])")


def on_files(files: Any, config: Any) -> Any:
    """Add the files that pages link to."""
    for page in list(files.documentation_pages()):
        for link in _LINK.findall(Path(page.abs_src_path).read_text()):
            path = _outside(page, link)
            if path is not None and files.get_file_from_path(_copy(path)) is None:
                files.append(File.generated(config, _copy(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the links to files outside docs/."""

    def to_copy(found: re.Match[str]) -> str:
        path = _outside(page.file, found[0])
        return found[0] if path is None else relpath(_copy(path), dirname(page.file.src_uri) or ".")

    return _LINK.sub(to_copy, markdown)


def _copy(path: str) -> str:
    # MkDocs requires a Markdown page in the navigation, and omits names with a leading dot
    return f"{_COPIES}/{path}".replace("/.", "/") + (".txt" if path.endswith(".md") else "")


def _outside(page: Any, link: str) -> str | None:
    """Return the path of a linked file in the repository; None if it is in docs/ or does not exist."""
    path = Path(os.path.normpath(Path(page.abs_src_path).parent / link))
    inside = path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT)
    return None if inside or not path.is_file() else str(path.relative_to(ROOT))
