"""The campaign of faults: its cases, what counts as a defect, and that it finds what is planted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import faults
import pytest
from fault_kinds import CONTROLS, KINDS, Fault, draw_cases
from fault_ranks import Attempt, RankEnd


def test_every_kind_of_fault_comes_before_any_comes_again() -> None:
    names = list(KINDS)
    cases = draw_cases(names, 2 * len(names), seed=3)
    assert sorted(case.kind for case in cases[: len(names)]) == sorted(names)
    assert cases == draw_cases(names, 2 * len(names), seed=3) != draw_cases(names, 2 * len(names), seed=4)
    for case in cases:
        assert 2 <= case.ranks <= 4 and all(0 <= rank < case.ranks for fault in case.faults for rank in fault.ranks)


def _ended(**other: Any) -> list[RankEnd]:
    """Rank 1 was killed, and rank 0 says so, or else."""
    said = RankEnd(1, 0.1, "RuntimeError: rank 1 has ended: Connection closed by peer", None)
    return [dataclasses.replace(said, **other), RankEnd(-9, 0.0, "", None)]


RIGHT_END = {"digest": "right", "first_step": 10, "steps": 60}


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (Attempt(_ended(), True, 20, [], []), []),
        (Attempt(_ended(code=0, result=RIGHT_END), True, 20, [], []), []),
        (Attempt(_ended(code=None), True, 20, [], []), ["hangs"]),
        (Attempt(_ended(code=0), True, 20, [], []), ["silent_losses"]),
        (Attempt(_ended(code=0, result={**RIGHT_END, "digest": "other"}), True, 20, [], []), ["silent_losses"]),
        (Attempt(_ended(error=""), True, 20, [], []), ["unnamed_errors"]),
        (Attempt(_ended(error="RuntimeError: Connection closed by peer [127.0.0.1]:1"), True, 20, [], []), ["unnamed_errors"]),
        (Attempt(_ended(error="RuntimeError: rank 0 lost its peer on port 1"), True, 20, [], []), ["unnamed_errors"]),
        (Attempt(_ended(error="RuntimeError: something is wrong with rank 1"), True, 20, [], []), ["unnamed_errors"]),
        (Attempt(_ended(), True, 20, ["python (7)"], ["torch_7"]), ["orphans", "shared_memory"]),
        (Attempt(_ended(), False, 20, [], []), ["unstruck"]),
    ],
)
def test_defects_after_a_fault(attempt: Attempt, expected: list[str]) -> None:
    fault = Fault("signal", "SIGKILL", (1,), 12, 0.0, 0.0, False)
    assert [defect for defect, _ in faults.defects(fault, attempt, ["right", "right"])] == expected


@pytest.mark.slow
def test_fault_campaign(tmp_path: Path) -> None:
    """A rank is killed, and one raises: no other hangs, and the training resumes to the same end."""
    written = tmp_path / "figures.json"
    faults.main(["--kinds", "killed", "raised_in_save", "--json", str(written), "--runs", "2"])
    figures = json.loads(written.read_text())["figures"]
    wrong = ("hangs", "silent_losses", "orphans", "shared_memory", "not_resumed", "unstruck", "failed")
    assert figures["runs"] == figures["resumed"] == 2 and not any(figures[name] for name in wrong)


@pytest.mark.slow
def test_fault_campaign_finds_what_is_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = ["other_weights", "began_anew", "says_nothing", "leaves_a_process", "leaves_memory"]
    assert CONTROLS.keys() == {*planted, "does_not_end"}, "and that takes half a minute, it is tested by hand above"
    written = tmp_path / "figures.json"
    faults.main(["--self-test", "--kinds", *planted, "--json", str(written), "--require", "silent_losses>=2"])
    monkeypatch.setattr(faults, "defects", lambda *given: [])
    with pytest.raises(SystemExit) as stopped:
        faults.main(["--self-test", "--kinds", "says_nothing"])
    assert stopped.value.code == 1
