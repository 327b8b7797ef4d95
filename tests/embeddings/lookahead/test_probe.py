"""When a probe, a function of the user or a trial run stops trying, and what follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.probe import LookaheadMode, Probe
from tests.helpers.jagged import LABEL, make_features

LOST = make_features(9)


def _learned(fallback: LookaheadMode = LookaheadMode.DRY_RUN) -> tuple[Probe, KeyedJaggedTensor]:
    probe, ids = Probe(fallback), make_features()
    assert probe.mode == LookaheadMode.PROBE and not probe.known and probe.ids_of({"ids": ids}) is None
    probe.learn({"ids": ids}, [ids])
    assert probe.known
    return probe, ids


def test_learns_and_tells() -> None:
    probe, _ = _learned()
    there = make_features(1)
    assert probe.ids_of({"ids": there}) == [there]
    for _ in range(5):
        probe.report(True, {}, [LOST])
    assert probe.mode == LookaheadMode.PROBE


def test_two_collections_in_one_batch() -> None:
    batch = {"user": make_features(0), "item": make_features(1)}
    probes = {name: Probe() for name in batch}
    for name, probe in probes.items():
        probe.learn(batch, [batch[name]])
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
        assert probe.mode == LookaheadMode.PROBE
        probe.report(False, batch, [here, LOST])
    probe.report(False, batch, [here])
    assert probe.mode == LookaheadMode.NONE and not probe.known


def test_nothing_found_is_the_end_unless_trial_runs_are_asked_for() -> None:
    probe = Probe()
    probe.learn({"label": LABEL}, [make_features()])
    assert probe.mode == LookaheadMode.NONE and not probe.known
    assert probe.reason == "they do not stand in the batch"


def test_nothing_found_is_a_case_for_a_dry_run() -> None:
    probe = Probe(LookaheadMode.DRY_RUN)
    probe.learn({"label": LABEL}, [make_features()])
    assert probe.mode == LookaheadMode.DRY_RUN and not probe.known
    assert probe.ids_of({"ids": make_features()}) is None
    probe.learn({"ids": (ids := make_features())}, [ids])
    assert probe.mode == LookaheadMode.DRY_RUN, "it stays one"


def _miss(probe: Probe) -> None:
    probe.report(False, {}, [LOST])


def _no_place(probe: Probe) -> None:
    assert probe.ids_of({"elsewhere": LABEL}) is None


@pytest.mark.parametrize("fallback", [LookaheadMode.DRY_RUN, LookaheadMode.NONE])
@pytest.mark.parametrize("fail", [_miss, _no_place])
def test_three_failures_in_a_row_end_a_probe(fail: Callable[[Probe], None], fallback: LookaheadMode) -> None:
    probe, _ = _learned(fallback)
    for failures in (2, 2, 3):
        probe.report(True, {}, [LOST])
        assert probe.mode == LookaheadMode.PROBE
        for _ in range(failures):
            fail(probe)
    assert probe.mode == fallback and not probe.known


def test_learns_another_place_and_keeps_the_old_one_if_there_is_none() -> None:
    probe, ids = _learned()
    probe.learn({"other": ids}, [ids])
    assert probe.ids_of({"other": ids}) == [ids]
    probe.learn({"label": LABEL}, [ids])
    assert probe.mode == LookaheadMode.PROBE and probe.ids_of({"other": ids}) == [ids]


def test_a_place_that_moves_with_every_batch_ends_a_probe_too() -> None:
    probe, ids = _learned()
    for step in range(3):
        batch = {f"step {step}": ids}
        assert probe.ids_of(batch) is None
        probe.learn(batch, [ids])
    assert probe.mode == LookaheadMode.DRY_RUN


def test_three_failures_in_a_row_end_a_dry_run() -> None:
    probe = Probe(LookaheadMode.DRY_RUN)
    probe.learn({"label": LABEL}, [make_features()])
    for matched in (False, False, True, False, False):
        probe.report(matched, {}, [LOST])
    assert probe.mode == LookaheadMode.DRY_RUN
    probe.report(False, {}, [LOST])
    assert probe.mode == LookaheadMode.NONE
    told = "they do not stand in the batch; a trial run of training_step looks up others than the step itself"
    assert probe.reason == told
    for _ in range(4):
        probe.report(False, {}, [LOST])
    probe.give_up("again")
    probe.learn({"ids": (ids := make_features())}, [ids])
    assert probe.mode == LookaheadMode.NONE and not probe.known and probe.reason == told


def test_a_dry_run_that_sees_nothing_ends_at_once() -> None:
    probe = Probe(LookaheadMode.DRY_RUN)
    probe.learn({"label": LABEL}, [make_features()])
    probe.give_up("training_step raised KeyError")
    assert probe.mode == LookaheadMode.NONE and "training_step raised KeyError" in probe.reason


def test_what_somebody_tells_until_it_was_wrong_three_times() -> None:
    probe, ids = Probe(), make_features()
    assert probe.told([ids], "my_function") == [ids] and probe.known
    for matched in (False, False, True, False, False):
        probe.report(matched, {}, [LOST])
        assert probe.told([ids], "my_function") == [ids]
    probe.report(False, {}, [LOST])
    assert probe.mode == LookaheadMode.NONE and not probe.known and probe.told([ids], "my_function") is None
    assert probe.reason == "my_function tells others than the model looks up"


def test_what_nobody_tells_any_more_is_looked_for_in_the_batch() -> None:
    probe, ids = Probe(), make_features()
    probe.told([ids], "my_function")
    assert probe.ids_of({"ids": ids}) is None and not probe.known
    probe.learn({"ids": ids}, [ids])
    assert probe.ids_of({"ids": ids}) == [ids]


def test_failures_of_the_probe_are_not_counted_against_the_dry_run() -> None:
    probe, _ = _learned()
    for _ in range(3):
        probe.report(False, {}, [LOST])
    probe.report(False, {}, [LOST])
    probe.report(False, {}, [LOST])
    assert probe.mode == LookaheadMode.DRY_RUN


@pytest.mark.parametrize("fallback", [LookaheadMode.DRY_RUN, LookaheadMode.NONE])
def test_the_proposal_is_the_mode_after_the_next_lookup(fallback: LookaheadMode) -> None:
    probe, _ = _learned(fallback)
    for predicted in (False, True, False, False, False):
        expected = probe.proposal.mode if predicted else probe.proposal.if_mispredicted
        probe.report(predicted, {}, [LOST])
        assert probe.mode == expected
    assert probe.mode == fallback


def test_the_agreed_mode_is_that_of_the_rank_that_knows_least() -> None:
    probe, _ = _learned()
    probe.follow_agreed_mode(LookaheadMode.PROBE)
    assert probe.known
    probe.follow_agreed_mode(LookaheadMode.DRY_RUN)
    assert probe.mode == LookaheadMode.DRY_RUN and not probe.known
    probe.follow_agreed_mode(LookaheadMode.PROBE)
    assert probe.mode == LookaheadMode.DRY_RUN
    probe.follow_agreed_mode(LookaheadMode.NONE)
    assert probe.mode == LookaheadMode.NONE and "another rank does not know them" in probe.reason


def test_the_notice_of_another_ranks_wrong_function_names_it() -> None:
    probe = Probe()
    probe.told([make_features()], "my_function")
    probe.follow_agreed_mode(LookaheadMode.NONE)
    assert probe.reason == "on another rank my_function does not tell what the model looks up"
