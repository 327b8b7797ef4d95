"""The list of benchmark runs fits the benchmarks, and says what it misses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import suite

BENCHMARKS = Path(suite.__file__).parent
RUNS = {name: command for group in suite.read_groups().values() for name, command in group.items()}
HARNESS = ("--json", "--require")


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_of_a_script_with_these_flags(name: str) -> None:
    known: list[str] = []
    for word in RUNS[name].split():
        if word.endswith(".py"):
            known = [*HARNESS, *(BENCHMARKS / word).read_text().split('"')]
        elif word.startswith("--"):
            assert word in known, f"{word} is no flag of the script before it"


def test_names_are_given_once() -> None:
    groups = suite.read_groups()
    assert len({*RUNS, *groups}) == len(groups) + sum(map(len, groups.values()))
    assert RUNS["quick_simulator"].count("--require") == 4 and "--json" not in RUNS["quick_simulator"]


def test_results_are_those_of_the_list() -> None:
    """A result that nobody knows how to measure again is of no use."""
    for result in (BENCHMARKS / "results").glob("*.json"):
        assert result.stem in RUNS
        command = json.loads(result.read_text())["measured_on"]["command"]
        scripts = [word.removeprefix("benchmarks/") for word in command.split() if word.endswith(".py")]
        assert scripts == [word for word in RUNS[result.stem].split() if word.endswith(".py")], result.name


def _main(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["suite.py", *words])
    suite.main()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, said in (
        (("no_such",), "no_such: there is no such run or group"),
        (("balance",), "balance reads {ml-1m}, {gowalla}, {yelp}, {peers}: pass --data or --peers FOLDER with it"),
        (("planning", "--data", str(tmp_path)), "planning reads {ml-1m}"),
    ):
        with pytest.raises(SystemExit):
            _main(monkeypatch, *words)
        assert said in capsys.readouterr().err
    _main(monkeypatch, "--list")
    assert "quick: quick_ladder, " in capsys.readouterr().out


def test_a_run_writes_its_result_and_one_that_falls_short_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ml-1m.seqs.npz").touch()
    ran = []
    monkeypatch.setattr(suite, "_run", lambda name, words: ran.append((name, words)) or name != "quick_simulator")
    _main(monkeypatch, "planning", "ladder_8", "--data", str(tmp_path))
    (planning, words), (_, lab) = ran
    assert planning == "planning" and words[1:] == [
        "benchmarks/planning.py", "--data", str(tmp_path / "ml-1m.seqs.npz"), "--json", str(suite.RESULTS / "planning.json")
    ]  # fmt: skip
    assert lab[:5] == [sys.executable, "benchmarks/netlab.py", "--hosts", "8", "--rate"]
    after = lab.index("--")
    assert lab[after + 1 : after + 3] == [sys.executable, "benchmarks/ladder.py"] and "docs/images/ladder_8.png" in lab
    with pytest.raises(SystemExit, match="fell short, or failed: quick_simulator"):
        _main(monkeypatch, "quick")
    assert not any("--json" in words for name, words in ran if name.startswith("quick"))
