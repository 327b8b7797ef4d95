"""Links have targets, figures equal benchmarks/results, and the site has every public name."""

from __future__ import annotations

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

from lightning_freescale._version import SITE
from lightning_freescale.profiling.reporting.verdict import LINKS
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, without_code

sys.path.append(str(ROOT / "scripts"))

import docs_callouts
import figures
import picture

# -- links

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s[^)]*)?\)|(?:src|href)=\"([^\"]+)\"")


@cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors of the headings: lower case, no punctuation, a hyphen for each space."""
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


def test_the_site_has_one_address_and_the_pages_that_verdicts_link_to() -> None:
    config, project = ((ROOT / name).read_text() for name in ("mkdocs.yml", "pyproject.toml"))
    assert re.findall(r"^site_url: (\S+)$", config, re.MULTILINE) == [SITE]
    assert re.findall(r'^\[project.urls\]\nDocumentation = "(\S+)"$', project, re.MULTILINE) == [SITE]
    assert "\nuse_directory_urls: false " in config, "page.md is page.html"
    for link in LINKS.values():
        page, _, anchor = link.removeprefix(SITE).partition(".html#")
        assert anchor in _anchors(DOCS / f"{page}.md"), link
    named = [path for path in (ROOT / "lightning_freescale").rglob("*.*") if path.suffix != ".pyc" and SITE in path.read_text()]
    assert [path.name for path in named] == ["_version.py"]


WIDTH = 100
"""The characters that a wide screen shows beside the navigation. Output is as a program prints it."""


def test_lines_of_code_fit_a_wide_screen() -> None:
    shown = [(page.name, block) for page in PAGES for block in blocks(page) if block.language != "text"]
    code = [(page, line) for page, block in shown for line in block.text.splitlines()]
    assert [(page, line) for page, line in code if len(line) > WIDTH] == []


def test_pages_of_benchmarks_are_short() -> None:
    lines = {page.name: len(page.read_text().splitlines()) for page in (DOCS / "benchmarks").glob("*.md")}
    assert {page: count for page, count in lines.items() if count > 120} == {}


# -- figures

MEASURED_ON = {"commit": "abc1234", "date": "2026-01-31", "cores": 2, "processor": "A Processor", "command": "python b.py"}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a repository with three results, a page and no table."""
    later = MEASURED_ON | {"commit": "def5678"}
    for name, result in {
        "ladder_8": {"figures": {"reduction": 0.9514, "lost": -0.0001, "speed_up": 2.178}, "measured_on": MEASURED_ON},
        "ladder_2": {"figures": {"speed_up": 2.0}, "measured_on": MEASURED_ON},
        "later": {
            "figures": {"heavy-1.1_mean": 0.5, "a row-wise table": "refused: row-wise"},
            "measured_on": later,
            "earlier": [later | {"processor": "Another", "figures": {"other": 1.5}}],
        },
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    for name, folder in {"ROOT": tmp_path, "RESULTS": tmp_path, "TABLES": tmp_path / "tables"}.items():
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(figures, name, folder)
    (tmp_path / "README.md").write_text("A page.")
    return tmp_path


def _table(repository: Path, template: str, names: str = "ladder_8", name: str = "one") -> figures.Table:
    path = repository / "tables" / f"{name}.md"
    path.write_text(f"{names}\n\n{template}\n")
    return figures.Table(path)


def _run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["figures.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        figures.main()
    return stopped.value.code


def test_a_wrong_figure_is_found_and_replaced(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = repository / "README.md"
    _table(repository, "{reduction:.1%} removed, {speed_up:.2f} times as fast")
    page.write_text("Before.\n\n95.2 % removed, 2.18 times as fast\nAfter.\n")
    wrong = page.read_text()
    assert _run(monkeypatch, "--check") == 1
    assert "README.md" in capsys.readouterr().out.splitlines()
    assert page.read_text() == wrong, "--check writes nothing"
    assert not _run(monkeypatch)
    assert page.read_text() == "Before.\n\n95.1 % removed, 2.18 times as fast\nAfter.\n"
    assert not _run(monkeypatch, "--check")


def test_a_table_has_one_place(repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _table(repository, "| {speed_up:.2f} times as fast |")
    assert "no page contains the table one.md" in str(_run(monkeypatch, "--check"))
    assert not _run(monkeypatch, "--print", "one")
    shown = capsys.readouterr().out
    assert shown == "| 2.18 times as fast |\n"
    (repository / "README.md").write_text(shown * 2)
    assert "README.md has 2 places for the table one.md" in str(_run(monkeypatch, "--check"))


def test_a_template_names_figures_that_exist(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for template, names in (("{speedup}", "ladder_8"), ("{speed_up}", "ladder_8 ladder_2")):
        _table(repository, template, names)
        message = str(_run(monkeypatch, "--check"))
        assert "one.md" in message and template in message
    with pytest.raises(ValueError, match=r"one.md: .* has no ladder_9.json"):
        _table(repository, "", "ladder_9")


ABC, DEF = (f"commit {commit}, 2026-01-31, 2 cores of A Processor" for commit in ("abc1234", "def5678"))


@pytest.mark.parametrize(
    ("template", "names", "shown"),
    [
        ("{reduction:.0%}, {lost:.0%}, {lost:.2%}", "ladder_8", "95 %, 0 %, -0.01 %"),
        ("{speed_up:m.0f} ms, {speed_up:k.4f}", "ladder_8", "2178 ms, 0.0022"),
        ("{ladder_8.speed_up:.1f} and {ladder_2.speed_up:.1f}, {where}", "ladder_8 ladder_2", f"2.2 and 2.0, {ABC}"),
        ("{where}", "ladder_8 ladder_2 later", f"{ABC}; {DEF}"),
        ("{later.where}, {later.heavy-1.1_mean:.1f}", "ladder_8 later", f"{DEF}, 0.5"),
        ("{a row-wise table}", "later", "refused: row-wise"),
    ],
)
def test_how_figures_are_shown(repository: Path, template: str, names: str, shown: str) -> None:
    assert _table(repository, template, names).text() == shown


def test_trends_show_earlier_runs_of_the_figures_in_tables(repository: Path) -> None:
    from trends import page

    _table(repository, "{speed_up:.2f}")
    shown = page()
    assert "| speed_<wbr>up | 2.178 |" in shown and "lost" not in shown
    assert "def5678, 2026-01-31, other processor |" in shown and "| heavy-1.1_<wbr>mean | 0.5 | - |" in shown


def test_pages_have_no_hidden_text() -> None:
    assert [page.name for page in PAGES if "<!--" in without_code(page.read_text())] == []


def test_the_pictures_show_the_results() -> None:
    assert {path.name: path.read_text() for path in picture.IMAGES.iterdir()} == picture.pictures(), "run `make figures`"


_UNIT = r"(?:ms|µs|s|minutes|hours|%|x|\u00d7|times|TFLOPS?|[KMG]i?B(?:/s)?)(?![\w/])"
RESULT = rf"(?<![\w.@-])[-+]?(?:\d[\d,.]* ?{_UNIT}|\d+ of \d+|\d+\.\d+(?!\w|\.\d))"
"""A number with the unit of a result, a ratio or a count of cases. Rates of links are settings."""
IN_TABLE = rf"{RESULT}|(?<![\w.@-])[-+]?\d[\d,.]*(?!\w)"
"""Numbers without a unit are results too."""
PUBLISHED = r"[Pp]ublished|[Pp]aper"
"""Sentences and columns with figures of others."""
SETTINGS = [
    "sleep of 1,440 ms",
    "more than 0.1 %",
    "15 s after the",
    "95 % confidence",
    "goal is at most 2 %",
    "15 % of the compute is assumed",
    "within [57] %",
    "10 of 100",
    "shares of compute of 30 % and 90 %",
]
"""Settings and thresholds that are not in a command, a list of what is assumed, or the first row or column of a table."""

MEASURED = r"[Mm]easured\]\([./]*benchmarks/"
"""Link of sentences with results, on pages about other things."""
COMPARED = r"[Mm]easured|faster|slower|longer|shorter|fewer"
"""Words of sentences with results, in the decisions."""


def _typed_figures(text: str, sentences: str = "") -> list[str]:
    """Return the figures of a page that come from no result and are neither settings nor published ones.

    Only sentences that match the expression ``sentences`` count.
    """
    for table in figures.tables():
        template = re.sub(r"\{[^}]*\}", "#", table.template)
        text = table.pattern().sub(lambda _, template=template: template, text)
    text = without_code(re.sub(r"^- \*\*(?:Command|Assumed):.*", "", text, flags=re.MULTILINE))
    text = re.sub(r"(?:^\|.*$\n?)+", _cells, text, flags=re.MULTILINE)
    found = []
    for line in text.splitlines():
        cell = line.startswith("|")
        for each in [line] if cell else re.split(r"(?<=[.:;]) ", line):
            if re.search(sentences, each) and (cell or not re.search(PUBLISHED, each)):
                each = re.sub("|".join([r"\[[^\]]*\]\([^)]*\)", *SETTINGS]), "", each)
                found += re.findall(IN_TABLE if cell else RESULT, each)
    return found


def _cells(table: re.Match[str]) -> str:
    """Return each cell as a line, without the first row and column and the columns with figures of others."""
    head, _, *rows = (line.strip("|").split("|") for line in table[0].splitlines())
    kept = (cell for row in rows for name, cell in list(zip(head, row, strict=True))[1:] if not re.search(PUBLISHED, name))
    return "".join(f"|{cell}\n" for cell in kept)


def test_measured_figures_come_from_results() -> None:
    pages = [ROOT / "README.md", *(DOCS / "benchmarks").glob("*.md")]
    assert {page.name: found for page in pages if (found := _typed_figures(page.read_text()))} == {}, "see scripts/figures.py"
    others = [page for page in PAGES if page not in pages]
    assert {page.name: found for page in others if (found := _typed_figures(page.read_text(), MEASURED))} == {}
    design = (DOCS / "design").glob("*.md")
    assert {page.name: found for page in design if (found := _typed_figures(page.read_text(), COMPARED))} == {}
    head = "| | 3 ms | published |\n|---|--:|--:|\n"
    settings = f"- **Command:** `a.py`, with 2 ms.\n{head}| 4 KiB at 50 Mbit/s | # | 9 |\n[arXiv 2.3](x) 1.2.3 NDCG@10"
    typed = f"It takes 0.5 ms, 1,200 MB or 3 % of 7 GB/s at 50 Mbit/s.\n{head}| 1 ms | -1.25, 2.0x, 2173 | 9 |\nIt is 1.5."
    assert _typed_figures(settings) == []
    assert _typed_figures("Of 2 ms, 5 % ([measured](../benchmarks/a.md)).", MEASURED) == ["2 ms", "5 %"]
    assert _typed_figures("It may take 2 ms. It is 3 ms faster.", COMPARED) == ["3 ms"]
    assert _typed_figures(typed) == ["0.5 ms", "1,200 MB", "3 %", "7 GB/s", "-1.25", "2.0x", "2173", "1.5"]
    assert _typed_figures("The published run had 9 ms; ours takes 3.5 ms and removes 99 %.") == ["3.5 ms", "99 %"]
    others = ["20 of 20", "10\u00d7", "12 TFLOPS", "5 minutes"]
    assert _typed_figures(f"They are {', '.join(others)}.") == others


def test_every_result_is_shown() -> None:
    shown = {name for table in figures.TABLES.iterdir() for name in table.read_text().partition("\n")[0].split()}
    assert {path.stem for path in figures.RESULTS.iterdir()} == shown, "add a table to benchmarks/tables, or remove the result"


def test_the_pages_have_the_figures_of_the_results() -> None:
    checked = subprocess.run([sys.executable, "scripts/figures.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, f"run `make figures`: {checked.stdout}{checked.stderr}"


# -- callouts

CHANGES = r"(?<!not )changes? (the )?results|gradient-identical|drops?( the)? targets|updates? only the rows"


def test_callouts_mark_all_text_about_changed_results() -> None:
    for page in PAGES:
        if page.stem == "limits" or page.parent.stem in ("benchmarks", "design"):  # lists of cases, and records
            continue
        shown = docs_callouts.on_page_markdown(page.read_text())
        assert "[!" not in shown, f"{page.name}: a callout is `> [!WARNING]` and a line `> **Title.** text`"
        plain = [line for line in without_code(shown).splitlines() if line[:1] not in (" ", "|", "!")]
        assert [line for line in plain if re.search(CHANGES, line, re.IGNORECASE)] == [], page.name


# -- names

PACKAGES = ["", ".balance", ".data", ".losses", ".metrics", ".profiling", ".comm", ".simulator", ".testing"]


def _public(module: ModuleType) -> set[str]:
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return set(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def test_every_public_name_has_a_place_on_the_site() -> None:
    pages = [page.read_text() for page in (DOCS / "api").glob("*.md")]
    shown = re.findall(r"^::: lightning_freescale\.(?:\w+\.)*(\w+)$", "\n".join(pages), re.MULTILINE)
    public = set().union(*(_public(import_module(f"lightning_freescale{package}")) for package in PACKAGES))
    public.add("RayFreeScaleStrategy")  # importing its module needs Ray
    assert public > {"FreeScaleStrategy", "assign", "ProcessGroupFreeScaleOptions", "run_distributed", "RankFailed"}
    assert sorted(shown) == sorted(public)
