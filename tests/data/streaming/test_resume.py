"""A resume changes nothing."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from lightning_freescale.data.streaming.stream_loader import BalancedStreamLoader
from lightning_freescale.testing import run_distributed
from tests.helpers.streams import Part, SeekablePart, loader_of, sample_cost


@pytest.mark.parametrize("kind", [Part, SeekablePart])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("balancing", ["local", "global"])
def test_resume_gives_the_batches_that_were_to_come(balancing: str, workers: int, kind: type[Part]) -> None:
    def run() -> None:
        options = {"stream_balancing": balancing, "num_workers": workers, "kind": kind, "pool_batches": 3, "max_pool_age": 6}
        whole = loader_of([70, 64], **options)
        whole.set_epoch(1)
        batches = list(whole)
        assert len(batches) > 15
        for consumed in (0, 1, 6, 13, len(batches) - 1, len(batches)):
            state = json.loads(json.dumps(whole.state_after(consumed)))
            resumed = loader_of([70, 64], **options)
            resumed.load_state_dict(state)
            resumed.set_epoch(1)
            assert list(resumed) == batches[consumed:]
            for step in range(consumed, len(batches)):
                assert resumed.counts(step) == whole.counts(step)
                assert resumed.costs(step).tolist() == whole.costs(step).tolist()
                assert resumed.unbalanced_costs(step).tolist() == whole.unbalanced_costs(step).tolist()
                assert resumed.loss_weight(step) == whole.loss_weight(step)
            assert resumed.state_after(consumed) == state
            if consumed < len(batches):
                assert resumed.stream_bound() == whole.stream_bound()
                assert resumed.state_after(len(batches)) == whole.state_after(len(batches))

    run_distributed(run, 2)


def test_state_counts_what_was_consumed_not_what_was_made() -> None:
    loader = loader_of([100])
    batches = iter(loader)
    seen = [next(batches) for _ in range(3)]
    state = loader.state_after(2)
    resumed = loader_of([100])
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == seen[2]
    with pytest.raises(ValueError, match=r"step=3 .*only those just loaded are \(0 to 2\)"):
        loader.state_after(4)


def test_resume_is_for_its_epoch() -> None:
    loader, other = loader_of([100]), loader_of([100])
    list(loader)
    other.load_state_dict(loader.state_after(5))
    other.set_epoch(1)
    assert len(list(other)) == 25
    assert other.state_after(0)["stream"] is None


def test_old_steps_are_forgotten() -> None:
    loader = loader_of([4 * 300], stream_balancing="global")
    list(loader)
    assert loader.counts(199) == [4]
    with pytest.raises(ValueError, match="step=150"):
        loader.state_after(151)


@pytest.mark.parametrize("balancing", ["local", "global"])
def test_state_is_small(balancing: str) -> None:
    loader = loader_of([4 * 200], kind=SeekablePart, stream_balancing=balancing)
    list(loader)
    state = loader.state_after(150)
    assert len(json.dumps(state)) < 2000
    assert state["stream"]["reader"]["first"] >= 4 * (150 - 33), "no more is read again than may still be held"
    assert len(state["stream"].get("rounds", [])) <= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 5}, "batch_size=4, this loader has batch_size=5"),
        ({"stream_balancing": "global"}, "stream_balancing='local'"),
    ],
)
def test_state_of_another_loader(change: dict[str, Any], message: str) -> None:
    loader = loader_of([100])
    list(islice(loader, 3))
    other = BalancedStreamLoader(Part(0, 100), **{"batch_size": 4, "cost_fn": sample_cost, **change})
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(loader.state_after(2))
    other.load_state_dict(loader.state_after(0))  # nothing was consumed: nothing can be lost


def test_a_stream_that_has_become_shorter() -> None:
    loader, other = loader_of([100]), loader_of([20])
    list(loader)
    other.load_state_dict(loader.state_after(20))
    with pytest.raises(ValueError, match="the data set ended before sample 99"):
        list(other)
