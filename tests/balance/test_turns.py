"""Candidates that take turns: which one a step has, and whether its time can be compared."""

from __future__ import annotations

from lightning_freescale.balance.turns import TRIAL_BLOCK, Turns


def test_each_has_a_block_and_short_epochs_come_to_all() -> None:
    turns = Turns("abc")
    assert "".join(turns.candidate(0, step) for step in range(3 * TRIAL_BLOCK)) == "".join(c * TRIAL_BLOCK for c in "abc")
    assert [turns.candidate(epoch, 0) for epoch in range(4)] == ["a", "b", "c", "a"]


def test_a_step_is_measured_that_follows_upon_one_of_its_own() -> None:
    turns = Turns("ab")
    measured = [turns.measured(0, step) for step in range(2 * TRIAL_BLOCK)]
    assert measured == [None, *[0] * (TRIAL_BLOCK - 1), None, *[1] * (TRIAL_BLOCK - 1)]
    assert Turns("a").measured(0, 1) is None, "nothing is compared with it"


def test_a_change_counts_from_its_step_on() -> None:
    turns = Turns("ab")
    turns.change("c", 0, 8)
    turns.change("de", 1, 2)
    assert [turns.candidate(0, step) for step in (5, 7, 8, 100)] == ["a", "b", "c", "c"]
    assert turns.candidate(1, 1) == "c"
    assert turns.candidate(1, 2) == turns.candidate(1, 3) == "e"
    assert turns.measured(0, 7) is None, "before the last change"
    assert turns.measured(1, 2) is None, "another one came before"
    assert turns.measured(1, 3) == 1
    assert turns.last == ("d", "e")
