"""Links lead somewhere, figures of README and docs are those of benchmarks/results, and the site has every public name."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, without_code

sys.path.append(str(ROOT / "scripts"))

import figures

# -- links

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s[^)]*)?\)|(?:src|href)=\"([^\"]+)\"")


@cache
def _anchors(page: Path) -> set[str]:
    """As forges and the site make them of headings: lower case, no punctuation, a hyphen for each space."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def _broken(page: Path, text: str) -> list[str]:
    broken = []
    for link in (first or second for first, second in _LINK.findall(without_code(text))):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            broken.append(link)
    return broken


def test_every_link_leads_somewhere() -> None:
    found = {str(page.relative_to(ROOT)): broken for page in PAGES if (broken := _broken(page, page.read_text()))}
    assert found == {}
    text = '[a](nowhere.md) [b](limits.md#nowhere) [c](#nowhere) [d](limits.md) `[e](code.md)` <img src="no.png">'
    assert _broken(DOCS / "index.md", text) == ["nowhere.md", "limits.md#nowhere", "#nowhere", "no.png"]


# -- figures

MEASURED_ON = {"commit": "abc1234", "date": "2026-01-31", "cores": 2, "processor": "A Processor", "command": "python b.py"}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with three results and no page yet."""
    later = MEASURED_ON | {"commit": "def5678"}
    for name, result in {
        "ladder_8": {"figures": {"reduction": 0.9514, "lost": -0.0001, "speed_up": 2.178}, "measured_on": MEASURED_ON},
        "ladder_2": {"figures": {"speed_up": 2.0}, "measured_on": MEASURED_ON},
        "later": {
            "figures": {"heavy-1.1_mean": 0.5},
            "measured_on": later,
            "earlier": [later | {"processor": "Another", "figures": {"other": 1.5}}],
        },
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    places = {"ROOT": tmp_path, "RESULTS": tmp_path, "TRENDS": tmp_path / "trends.md", "PAGES": [tmp_path / "page.md"]}
    for name, place in places.items():
        monkeypatch.setattr(figures, name, place)
    return tmp_path


def _block(template: str, shown: str = "", names: str = "ladder_8") -> str:
    return f"Before.\n<!-- figures {names}\n{template}\n-->\n{shown}<!-- /figures -->\nAfter.\n"


def _run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["figures.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        figures.main()
    return stopped.value.code


def test_a_wrong_figure_is_found_and_written_anew(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, template = repository / "page.md", "{reduction:.1%} gone, {speed_up:.2f} times as fast"
    page.write_text(_block(template, "95.2 % gone, 2.18 times as fast\n"))
    wrong = page.read_text()
    assert _run(monkeypatch, "--check") == 1
    assert "page.md" in capsys.readouterr().out.splitlines()
    assert page.read_text() == wrong, "--check writes nothing"
    assert not _run(monkeypatch)
    assert page.read_text() == _block(template, "95.1 % gone, 2.18 times as fast\n")
    assert not _run(monkeypatch, "--check")
    trends = (repository / "trends.md").read_text()
    assert "| speed_up | 2.178 |" in trends and "lost" not in trends, "a page shows some figures of a file"
    assert "def5678, 2026-01-31, other processor |" in trends and "| heavy-1.1_mean | 0.5 | - |" in trends
    for named in ("{ladder_9.speed_up}", "{speedup}"):
        page.write_text(_block(named))
        assert all(word in str(_run(monkeypatch, "--check")) for word in ("page.md", named))


ABC, DEF = (f"commit {commit}, 2026-01-31, 2 cores of A Processor" for commit in ("abc1234", "def5678"))


@pytest.mark.parametrize(
    ("template", "names", "shown"),
    [
        ("{reduction:.0%}, {lost:.0%}, {lost:.2%}", "ladder_8", "95 %, 0 %, -0.01 %"),
        ("{speed_up:m.0f} ms, {speed_up:k.4f}, `{command}`", "ladder_8", "2178 ms, 0.0022, `python b.py`"),
        ("{ladder_8.speed_up:.1f} and {ladder_2.speed_up:.1f}, {where}", "ladder_8 ladder_2", f"2.2 and 2.0, {ABC}"),
        ("{where}", "ladder_8 ladder_2 later", f"{ABC}; {DEF}"),
        ("{later.where}, {later.heavy-1.1_mean:.1f}", "ladder_8 later", f"{DEF}, 0.5"),
    ],
)
def test_how_figures_are_shown(repository: Path, template: str, names: str, shown: str) -> None:
    assert figures.with_figures(_block(template, names=names)) == _block(template, f"{shown}\n", names)


def test_the_pages_have_the_figures_of_the_results() -> None:
    checked = subprocess.run([sys.executable, "scripts/figures.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, f"`make figures` writes these anew: {checked.stdout}{checked.stderr}"


# -- names

ROOMS = ["", ".balance", ".data", ".losses", ".metrics", ".profiling", ".comm", ".simulator", ".testing"]


def _public(module: ModuleType) -> set[str]:
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return set(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def test_every_public_name_has_a_place_on_the_site() -> None:
    pages = [page.read_text() for page in (DOCS / "api").glob("*.md")]
    shown = re.findall(r"^::: lightning_freescale\.(?:\w+\.)*(\w+)$", "\n".join(pages), re.MULTILINE)
    public = set().union(*(_public(import_module(f"lightning_freescale{room}")) for room in ROOMS))
    public.add("RayFreeScaleStrategy")  # importing its module needs Ray
    assert public > {"FreeScaleStrategy", "assign", "ProcessGroupFreeScaleOptions", "run_distributed", "RankFailed"}
    assert sorted(shown) == sorted(public)


# -- messages


def test_messages_that_a_page_quotes_are_those_of_the_package() -> None:
    """The index in docs/limits.md; "..." stands for what is filled in."""
    lines = (DOCS / "limits.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert len(rows) > 100 and all(len(row) == 3 and all(row) for row in rows)
    quoted = [row[0].strip("`") for row in rows]
    assert sorted(quoted) == sorted(set(quoted)), "each message once"
    templates = []
    for path in (ROOT / "lightning_freescale").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                templates.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                templates.append(node.value)

    def is_said(beginning: str) -> bool:
        pattern = re.compile(r"(?:\0|\.\.\.)".join(re.escape(part) for part in beginning.split("...")))
        return any(pattern.match(template) for template in templates)

    assert [beginning for beginning in quoted if not is_said(beginning)] == []
