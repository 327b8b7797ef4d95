"""The end of the prediction of ids by a probe or a function of the user, and the results that a function may return."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.id_prediction import Probe
from lightning_freescale.embeddings.plain_embedding import EmbeddingIds
from lightning_freescale.training.next_ids import IdsFunction
from tests.helpers.jagged import LABEL, make_features, same_features

LOST = make_features(9)


def _learned() -> tuple[Probe, KeyedJaggedTensor]:
    probe, ids = Probe(), make_features()
    assert not probe.gave_up and not probe.known and probe.ids_of({"ids": ids}) is None
    probe.learn({"ids": ids}, [ids])
    assert probe.known
    return probe, ids


def _miss(probe: Probe, times: int = 1) -> None:
    for _ in range(times):
        probe.report(False, {}, [LOST])


def _no_place(probe: Probe, times: int = 1) -> None:
    for _ in range(times):
        assert probe.ids_of({"elsewhere": LABEL}) is None


def test_several_lookups_of_a_step() -> None:
    """Check lookups at any place, the same ids twice, and lookups that only some steps make."""
    probe, here, there = Probe(), make_features(0), make_features(1)
    batch = {"here": here, "there": there}
    probe.learn(batch, [there, here])
    assert probe.ids_of(batch) == [there, here]
    probe.report(False, batch, [there, here, here])
    assert probe.ids_of(batch) == [there, here, here]
    assert probe.ids_of({"here": here}) == [here, here], "a batch may lack some"
    for _ in range(3):
        assert not probe.gave_up
        probe.report(False, batch, [here, LOST])
    probe.report(False, batch, [here])
    assert probe.gave_up and not probe.known


def test_learns_another_place_and_keeps_the_old_one_if_there_is_none() -> None:
    probe, ids = _learned()
    probe.learn({"other": ids}, [ids])
    assert probe.ids_of({"other": ids}) == [ids]
    probe.learn({"label": LABEL}, [ids])
    assert not probe.gave_up and probe.ids_of({"other": ids}) == [ids]


@pytest.mark.parametrize("fail", [_miss, _no_place])
def test_three_failures_in_a_row_end_a_probe(fail: Callable[[Probe, int], None]) -> None:
    probe, ids = _learned()
    for failures in (2, 2, 3):
        probe.report(True, {}, [LOST])
        assert not probe.gave_up
        fail(probe, failures)
    reason = probe.reason
    assert probe.gave_up and not probe.known and reason
    _miss(probe, 4)
    probe.give_up("again")
    probe.learn({"ids": ids}, [ids])
    assert probe.gave_up and not probe.known and probe.reason == reason


def test_a_place_that_moves_with_every_batch_ends_a_probe_too() -> None:
    probe, ids = _learned()
    for step in range(3):
        batch = {f"step {step}": ids}
        assert probe.ids_of(batch) is None
        probe.learn(batch, [ids])
    assert probe.gave_up


def test_nothing_found_is_the_end() -> None:
    probe, ids = Probe(), make_features()
    probe.learn({"label": LABEL}, [ids])
    assert probe.gave_up and not probe.known and probe.reason
    probe.learn({"ids": ids}, [ids])
    assert probe.gave_up and probe.ids_of({"ids": ids}) is None


def test_what_a_function_tells_until_it_was_wrong_three_times() -> None:
    probe, ids = Probe(), make_features()
    assert probe.accept([ids], "my_function") == [ids] and probe.known
    for matched in (False, False, True, False, False):
        probe.report(matched, {}, [LOST])
        assert probe.accept([ids], "my_function") == [ids]
    _miss(probe)
    assert probe.gave_up and not probe.known and probe.accept([ids], "my_function") is None
    assert "my_function" in probe.reason


def test_what_a_function_no_longer_tells_is_looked_for_in_the_batch() -> None:
    probe, ids = Probe(), make_features()
    probe.accept([ids], "my_function")
    assert probe.ids_of({"ids": ids}) is None and not probe.known
    probe.learn({"ids": ids}, [ids])
    assert probe.ids_of({"ids": ids}) == [ids]


def test_gives_up_tells_the_state_after_the_next_lookup() -> None:
    probe, _ = _learned()
    for predicted in (False, True, False, False, False):
        expected = probe.gives_up[not predicted]
        probe.report(predicted, {}, [LOST])
        assert probe.gave_up == expected
    assert probe.gave_up


def test_all_ranks_give_up_if_one_does() -> None:
    probe, _ = _learned()
    for _ in range(2):
        probe.give_up_with_others()
        assert probe.gave_up and not probe.known and "another rank" in probe.reason
    probe = Probe()
    probe.accept([make_features()], "my_function")
    probe.give_up_with_others()
    assert "another rank my_function" in probe.reason


IDS = make_features()


def _ids(
    returned: Any, overlapped: tuple[str, ...] = ("net.items",), plain: tuple[str, ...] = (), embeddings: tuple[str, ...] = ()
) -> dict[str, Any]:
    return IdsFunction(lambda batch: returned, "my_function", overlapped, plain, embeddings)({"any": "batch"})


def test_ids_of_one_collection_or_of_some_by_path() -> None:
    assert _ids(IDS) == _ids(IDS, plain=("bags",)) == {"net.items": [IDS]}
    assert _ids([IDS, IDS]) == _ids({"net.items": (IDS, IDS)}) == {"net.items": [IDS, IDS]}, "of two lookups"
    assert _ids(OrderedDict(tags=IDS), ("net.items", "tags")) == {"tags": [IDS]}
    assert _ids({}, ("net.items", "tags")) == {}
    assert _ids({"tags": IDS, "bags": IDS}, ("tags",), ("bags",)) == {"tags": [IDS]}, "the others are exchanged by TorchRec"


def test_an_embedding_takes_a_tensor() -> None:
    ids = torch.arange(6).view(2, 3)
    expected = EmbeddingIds("item_emb", ids)
    assert same_features(_ids(ids, ("item_emb",), embeddings=("item_emb",))["item_emb"][0], expected)
    found = _ids({"item_emb": ids, "tags": IDS}, ("item_emb", "tags"), embeddings=("item_emb",))
    assert same_features(found["item_emb"][0], expected) and found["tags"] == [IDS]


@pytest.mark.parametrize(
    ("returned", "kind", "parts"),
    [
        (IDS, ValueError, "without a path.*'item_emb', 'tags'"),
        ([IDS], ValueError, "without a path.*'item_emb', 'tags'"),
        (None, TypeError, "NoneType.*'item_emb', 'tags'"),
        ({"net": IDS}, ValueError, "'net'.*'item_emb', 'tags'"),
        ({"tags": None}, TypeError, "NoneType for 'tags'"),
        ({"tags": [IDS, 3]}, TypeError, "int for 'tags'"),
        ({"tags": torch.arange(3)}, TypeError, "Tensor for 'tags'.*KeyedJaggedTensor"),
        ({"item_emb": IDS}, TypeError, "KeyedJaggedTensor for 'item_emb'.*tensor"),
    ],
)
def test_refused(returned: Any, kind: type[Exception], parts: str) -> None:
    with pytest.raises(kind, match=f"my_function.*{parts}"):
        _ids(returned, ("item_emb", "tags"), embeddings=("item_emb",))


def test_its_own_error_comes_with_its_traceback_and_a_note() -> None:
    def broken(batch: Any) -> Any:
        return batch["nothing"]

    with pytest.raises(KeyError, match="nothing") as raised:
        IdsFunction(broken, "my_function", ["net.items"])({})
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "broken"
    assert "my_function" in raised.value.__notes__[0]
