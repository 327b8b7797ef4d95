"""The figures of README and docs are those of benchmarks/results, and a page that differs is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT

sys.path.append(str(ROOT / "scripts"))

import figures
import trends

MEASURED_ON = {"commit": "abc1234", "date": "2026-01-31", "cores": 2, "processor": "A Processor", "command": "python b.py"}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two results and no page yet."""
    for name, found in {
        "ladder_8": {"reduction": 0.9514, "speed_up": 2.178, "lost": -0.0001},
        "ladder_2": {"speed_up": 2.0},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"figures": found, "measured_on": MEASURED_ON}))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "TRENDS", tmp_path / "trends.md")
    monkeypatch.setattr(figures, "PAGES", [tmp_path / "page.md"])
    return tmp_path


def _block(template: str, shown: str = "", names: str = "ladder_8") -> str:
    return f"Before.\n<!-- figures {names}\n{template}-->\n{shown}<!-- /figures -->\nAfter.\n"


def _run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["figures.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        figures.main()
    return stopped.value.code


def test_a_wrong_figure_is_found_and_written_anew(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, template = repository / "page.md", "{reduction:.1%} gone, {speed_up:.2f} times as fast\n"
    page.write_text(_block(template, "95.2 % gone, 2.18 times as fast\n"))
    wrong = page.read_text()
    assert _run(monkeypatch, "--check") == 1
    assert "page.md" in capsys.readouterr().out.splitlines()
    assert page.read_text() == wrong, "--check writes nothing"
    assert not _run(monkeypatch)
    assert page.read_text() == _block(template, "95.1 % gone, 2.18 times as fast\n")
    assert not _run(monkeypatch, "--check")
    page.write_text(page.read_text().replace("After", "Later"))
    assert not _run(monkeypatch, "--check"), "what is outside of a block is its author's"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{reduction:.1%}", "95.1 %"),
        ("{reduction:.0%}", "95 %"),
        ("{lost:.0%}, {lost:.2%}", "0 %, -0.01 %"),
        ("**{reduction:+.2%}**", "**+95.14 %**"),
        ("{speed_up:.3f}", "2.178"),
        ("{speed_up:m.0f} ms, {speed_up:k.4f}", "2178 ms, 0.0022"),
        ("{where}", "commit abc1234, 2026-01-31, 2 cores of A Processor"),
        ("`{command}`", "`python b.py`"),
    ],
)
def test_how_figures_are_shown(repository: Path, template: str, shown: str) -> None:
    assert figures.with_figures(_block(template + "\n")) == _block(template + "\n", shown + "\n")


def test_figures_of_several_files_have_their_files_name(repository: Path) -> None:
    template, names = "{ladder_8.speed_up:.1f} and {ladder_2.speed_up:.1f}, {where}\n", "ladder_8 ladder_2"
    shown = "2.2 and 2.0, commit abc1234, 2026-01-31, 2 cores of A Processor\n"
    assert figures.with_figures(_block(template, names=names)) == _block(template, shown, names)


def test_where_is_told_of_each_file_that_was_measured_elsewhere(repository: Path) -> None:
    later = {"figures": {"speed_up": 1.0}, "measured_on": MEASURED_ON | {"commit": "def5678"}}
    (repository / "later.json").write_text(json.dumps(later))
    first, second = (f"commit {commit}, 2026-01-31, 2 cores of A Processor" for commit in ("abc1234", "def5678"))
    for template, shown in (("{where}\n", f"{first}; {second}\n"), ("{later.where}\n", f"{second}\n")):
        names = "ladder_8 ladder_2 later"
        assert figures.with_figures(_block(template, names=names)) == _block(template, shown, names)


def test_names_of_figures_may_have_dots(repository: Path) -> None:
    (repository / "gaps.json").write_text(json.dumps({"figures": {"heavy-1.1_mean": 0.5}, "measured_on": MEASURED_ON}))
    assert figures.with_figures(_block("{heavy-1.1_mean:.1f}\n", names="gaps")) == _block(
        "{heavy-1.1_mean:.1f}\n", "0.5\n", "gaps"
    )
    template = "{gaps.heavy-1.1_mean:.1f}\n"
    assert figures.with_figures(_block(template, names="ladder_8 gaps")) == _block(template, "0.5\n", "ladder_8 gaps")


@pytest.mark.parametrize(
    ("template", "names", "told"),
    [
        ("{speed_up}", "ladder_9", ["page.md", "ladder_9.json"]),
        ("{speedup}", "ladder_8", ["page.md", "{speedup}", "speed_up"]),
        ("{speed_up}", "ladder_8 ladder_2", ["page.md", "{speed_up}", "FILE.FIGURE"]),
        ("{ladder_3.speed_up}", "ladder_8", ["page.md", "{ladder_3.speed_up}", "ladder_8"]),
    ],
)
def test_what_is_missing_is_named(
    repository: Path, monkeypatch: pytest.MonkeyPatch, template: str, names: str, told: list[str]
) -> None:
    (repository / "page.md").write_text(_block(template + "\n", names=names))
    code = str(_run(monkeypatch, "--check"))
    assert all(word in code for word in told), code


def test_trends_show_what_pages_show(repository: Path) -> None:
    (repository / "page.md").write_text(_block("{speed_up:.2f}, {where}\n"))
    result = json.loads((repository / "ladder_8.json").read_text())
    former = {name: MEASURED_ON[name] for name in ("commit", "date", "processor", "command")} | {"commit": "0ld0ld0"}
    result["earlier"] = [
        former | {"figures": {"speed_up": 1.5}},
        former | {"processor": "Another", "figures": {"reduction": 0.5}},
    ]
    (repository / "ladder_8.json").write_text(json.dumps(result))
    text = figures.wanted()[repository / "trends.md"]
    assert "| | abc1234, 2026-01-31 | 0ld0ld0, 2026-01-31 | 0ld0ld0, 2026-01-31, other processor |" in text
    assert "| speed_up | 2.178 | 1.5 | - |" in text, "newest first, and what a run had not is not made up"
    assert "reduction" not in text, "no page shows it"
    assert "| speed_up | 2 |" in text, "a file that no page shows has all, and one run one column"


def test_trends_end_somewhere(repository: Path) -> None:
    result = {"figures": {"gap": 0.0}, "measured_on": MEASURED_ON, "earlier": [MEASURED_ON | {"figures": {"gap": 1.0}}] * 50}
    (repository / "long.json").write_text(json.dumps(result))
    row = next(line for line in trends.page(repository, {}).splitlines() if line.startswith("| gap"))
    assert row.count("|") == trends.RUNS + 2


def test_the_pages_have_the_figures_of_the_results() -> None:
    checked = subprocess.run([sys.executable, "scripts/figures.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, f"`make figures` writes these anew: {checked.stdout}{checked.stderr}"
