"""When a probe, a function of the user or a trial run stops trying, and what follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.probe import LookaheadMode, Probe
from tests.helpers.jagged import LABEL, make_features

LOST = make_features(9)
DRY_RUN, NONE, PROBE = LookaheadMode.DRY_RUN, LookaheadMode.NONE, LookaheadMode.PROBE


def _learned(fallback: LookaheadMode = DRY_RUN) -> tuple[Probe, KeyedJaggedTensor]:
    probe, ids = Probe(fallback), make_features()
    assert probe.mode == PROBE and not probe.known and probe.ids_of({"ids": ids}) is None
    probe.learn({"ids": ids}, [ids])
    assert probe.known
    return probe, ids


def _without_place(fallback: LookaheadMode = DRY_RUN) -> Probe:
    probe = Probe(fallback)
    probe.learn({"label": LABEL}, [make_features()])
    return probe


def _miss(probe: Probe, times: int = 1) -> None:
    for _ in range(times):
        probe.report(False, {}, [LOST])


def _no_place(probe: Probe, times: int = 1) -> None:
    for _ in range(times):
        assert probe.ids_of({"elsewhere": LABEL}) is None


def test_learns_and_tells_by_collection() -> None:
    batch = {"user": make_features(0), "item": make_features(1)}
    probes = {name: Probe() for name in batch}
    for name, probe in probes.items():
        probe.learn(batch, [batch[name]])
        for _ in range(5):
            probe.report(True, {}, [LOST])
        assert probe.mode == PROBE
    later = {"user": make_features(2), "item": make_features(3)}
    assert {name: probe.ids_of(later) for name, probe in probes.items()} == {name: [ids] for name, ids in later.items()}


def test_several_lookups_of_a_step() -> None:
    """Wherever they stand; the same ids twice are two lookups, and what comes later in some steps stays."""
    probe, here, there = Probe(), make_features(0), make_features(1)
    batch = {"here": here, "there": there}
    probe.learn(batch, [there, here])
    assert probe.ids_of(batch) == [there, here]
    probe.report(False, batch, [there, here, here])
    assert probe.ids_of(batch) == [there, here, here]
    assert probe.ids_of({"here": here}) == [here, here], "a batch may lack some"
    for _ in range(3):
        assert probe.mode == PROBE
        probe.report(False, batch, [here, LOST])
    probe.report(False, batch, [here])
    assert probe.mode == NONE and not probe.known


def test_learns_another_place_and_keeps_the_old_one_if_there_is_none() -> None:
    probe, ids = _learned()
    probe.learn({"other": ids}, [ids])
    assert probe.ids_of({"other": ids}) == [ids]
    probe.learn({"label": LABEL}, [ids])
    assert probe.mode == PROBE and probe.ids_of({"other": ids}) == [ids]


@pytest.mark.parametrize("fallback", [DRY_RUN, NONE])
@pytest.mark.parametrize("fail", [_miss, _no_place])
def test_three_failures_in_a_row_end_a_probe(fail: Callable[[Probe, int], None], fallback: LookaheadMode) -> None:
    probe, _ = _learned(fallback)
    for failures in (2, 2, 3):
        probe.report(True, {}, [LOST])
        assert probe.mode == PROBE
        fail(probe, failures)
    assert probe.mode == fallback and not probe.known
    _miss(probe, 2)
    assert probe.mode == fallback, "they are not counted against a trial run"


def test_a_place_that_moves_with_every_batch_ends_a_probe_too() -> None:
    probe, ids = _learned()
    for step in range(3):
        batch = {f"step {step}": ids}
        assert probe.ids_of(batch) is None
        probe.learn(batch, [ids])
    assert probe.mode == DRY_RUN


def test_nothing_found_is_the_end_or_a_case_for_a_trial_run() -> None:
    probe = _without_place(NONE)
    assert probe.mode == NONE and not probe.known and probe.reason
    probe, ids = _without_place(), make_features()
    assert probe.mode == DRY_RUN and not probe.known and probe.ids_of({"ids": ids}) is None
    probe.learn({"ids": ids}, [ids])
    assert probe.mode == DRY_RUN, "it stays one"
    probe.give_up("training_step raised KeyError")
    assert probe.mode == NONE and "training_step raised KeyError" in probe.reason


def test_three_failures_in_a_row_end_a_dry_run() -> None:
    probe = _without_place()
    before = probe.reason
    for matched in (False, False, True, False, False):
        probe.report(matched, {}, [LOST])
    assert probe.mode == DRY_RUN
    _miss(probe)
    reason = probe.reason
    assert probe.mode == NONE and reason.startswith(f"{before}; ") and "trial run" in reason
    _miss(probe, 4)
    probe.give_up("again")
    probe.learn({"ids": (ids := make_features())}, [ids])
    assert probe.mode == NONE and not probe.known and probe.reason == reason


def test_what_a_function_tells_until_it_was_wrong_three_times() -> None:
    probe, ids = Probe(), make_features()
    assert probe.told([ids], "my_function") == [ids] and probe.known
    for matched in (False, False, True, False, False):
        probe.report(matched, {}, [LOST])
        assert probe.told([ids], "my_function") == [ids]
    _miss(probe)
    assert probe.mode == NONE and not probe.known and probe.told([ids], "my_function") is None
    assert "my_function" in probe.reason


def test_what_a_function_no_longer_tells_is_looked_for_in_the_batch() -> None:
    probe, ids = Probe(), make_features()
    probe.told([ids], "my_function")
    assert probe.ids_of({"ids": ids}) is None and not probe.known
    probe.learn({"ids": ids}, [ids])
    assert probe.ids_of({"ids": ids}) == [ids]


@pytest.mark.parametrize("fallback", [DRY_RUN, NONE])
def test_the_proposal_is_the_mode_after_the_next_lookup(fallback: LookaheadMode) -> None:
    probe, _ = _learned(fallback)
    for predicted in (False, True, False, False, False):
        expected = probe.proposal.mode if predicted else probe.proposal.if_mispredicted
        probe.report(predicted, {}, [LOST])
        assert probe.mode == expected
    assert probe.mode == fallback


def test_the_agreed_mode_is_that_of_the_rank_that_knows_least() -> None:
    probe, _ = _learned()
    probe.follow_agreed_mode(PROBE)
    assert probe.known
    for mode in (DRY_RUN, PROBE):
        probe.follow_agreed_mode(mode)
        assert probe.mode == DRY_RUN and not probe.known
    probe.follow_agreed_mode(NONE)
    assert probe.mode == NONE and "another rank" in probe.reason
    probe = Probe()
    probe.told([make_features()], "my_function")
    probe.follow_agreed_mode(NONE)
    assert "another rank my_function" in probe.reason
