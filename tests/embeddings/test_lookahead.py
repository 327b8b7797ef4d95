"""Where in a batch the ids are, and whether those announced are those looked up."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead import Captured, Probe, find_path, follow, same_features

KEYS = ["history", "category"]


def _features(seed: int = 0, weighted: bool = False, offsets: bool = False) -> KeyedJaggedTensor:
    """Two features of three samples."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 4, (6,), generator=draw)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=draw)
    weights = torch.rand(len(values), generator=draw) if weighted else None
    if offsets:
        jagged = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return KeyedJaggedTensor(list(KEYS), values, weights, offsets=jagged)
    return KeyedJaggedTensor(list(KEYS), values, weights, lengths=lengths)


def _copy(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights = features.weights_or_none()
    lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    return KeyedJaggedTensor(
        list(features.keys()),
        features.values().clone(),
        None if weights is None else weights.clone(),
        lengths=None if lengths is None else lengths.clone(),
        offsets=None if offsets is None else offsets.clone(),
    )


class Pair(NamedTuple):
    label: Any
    inputs: Any


@dataclasses.dataclass
class Record:
    label: Any
    inputs: Any


@dataclasses.dataclass
class Slotted:
    __slots__ = ("inputs", "label")
    label: Any
    inputs: Any


class Holder:
    """A plain object that leads back to itself."""

    def __init__(self, inputs: Any) -> None:
        self.me, self.inputs, self.name = self, inputs, "holder"


LABEL = torch.zeros(3)
BATCHES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda ids: ids,
    "dict": lambda ids: {"label": LABEL, "ids": ids},
    "ordered": lambda ids: OrderedDict(label=LABEL, ids=ids),
    "mapping": lambda ids: UserDict(label=LABEL, ids=ids),
    "number as key": lambda ids: {0: LABEL, 1: ids},
    "list": lambda ids: [LABEL, None, ids],
    "tuple": lambda ids: (LABEL, ids),
    "named tuple": lambda ids: Pair(LABEL, ids),
    "data class": lambda ids: Record(LABEL, ids),
    "slots": lambda ids: Slotted(LABEL, ids),
    "object": lambda ids: Holder(ids),
    "namespace": lambda ids: SimpleNamespace(label=LABEL, ids=ids),
    "nested": lambda ids: {"a": [Record(LABEL, Pair({"x": LABEL}, Holder((ids,))))]},
    "long list before": lambda ids: {"names": [str(n) for n in range(50_000)], "more": [[ids]]},
}


@pytest.mark.parametrize("kind", list(BATCHES))
@pytest.mark.parametrize("weighted", [False, True])
def test_the_object_itself(kind: str, weighted: bool) -> None:
    make, here, there = BATCHES[kind], _features(0, weighted), _features(1, weighted)
    path = find_path(make(here), here)
    assert path is not None
    assert follow(make(there), path) is there
    assert find_path(make(here), there) is None


def _rewrapped(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return features.to(torch.device("cpu"))


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_another_object_over_the_same_memory(weighted: bool, offsets: bool) -> None:
    here = _features(0, weighted, offsets)
    path = find_path({"wrong": _features(3, weighted, offsets), "ids": here}, _rewrapped(here))
    assert path is not None and path.whole is not None
    there = _features(1)
    assert follow({"wrong": here, "ids": there}, path) is there


def test_the_object_itself_comes_before_another_over_its_memory() -> None:
    here = _features()
    path = find_path({"other": _rewrapped(here), "ids": here}, here)
    assert path is not None
    assert follow({"other": _features(1), "ids": here}, path) is here


def test_the_same_memory_under_other_keys_or_weights_is_another() -> None:
    here = _features(0, weighted=True)
    for batch in (
        KeyedJaggedTensor(["x", "y"], here.values(), here.weights(), lengths=here.lengths()),
        KeyedJaggedTensor(list(KEYS), here.values(), lengths=here.lengths()),
        KeyedJaggedTensor(list(KEYS), here.values(), here.weights().clone(), lengths=here.lengths()),
        KeyedJaggedTensor(list(KEYS), here.values(), here.weights(), lengths=here.lengths().clone()),
        KeyedJaggedTensor(list(KEYS), here.values().clone(), here.weights(), lengths=here.lengths()),
    ):
        path = find_path({"ids": batch}, here)
        assert path is None or path.whole is None


# -- made in the step

MADE: dict[str, tuple[str, Callable[..., KeyedJaggedTensor]]] = {
    "lengths": ("lengths", lambda values, jagged, weights: KeyedJaggedTensor(KEYS, values, weights, lengths=jagged)),
    "offsets": ("offsets", lambda values, jagged, weights: KeyedJaggedTensor(KEYS, values, weights, offsets=jagged)),
    "lengths sync": (
        "lengths",
        lambda values, jagged, weights: KeyedJaggedTensor.from_lengths_sync(KEYS, values, jagged, weights),
    ),
    "offsets sync": (
        "offsets",
        lambda values, jagged, weights: KeyedJaggedTensor.from_offsets_sync(KEYS, values, jagged, weights),
    ),
}


def _tensors(kind: str, seed: int, weighted: bool) -> dict[str, Any]:
    features = _features(seed, weighted)
    jagged = features.lengths() if MADE[kind][0] == "lengths" else features.offsets()
    found = {"label": LABEL, "inner": [features.values(), jagged]}
    return {**found, "weights": features.weights()} if weighted else found


@pytest.mark.parametrize("kind", list(MADE))
@pytest.mark.parametrize("weighted", [False, True])
def test_made_of_tensors_in_the_batch(kind: str, weighted: bool) -> None:
    def step(batch: dict[str, Any]) -> KeyedJaggedTensor:
        made = MADE[kind][1](*batch["inner"], batch.get("weights"))
        made.lengths(), made.offsets()  # whatever was done with it since
        return made

    here, there = _tensors(kind, 0, weighted), _tensors(kind, 1, weighted)
    path = find_path(here, step(here))
    assert path is not None and path.whole is None
    ids = follow(there, path)
    assert ids is not None and ids.keys() == KEYS and ids.keys() is not KEYS
    assert same_features(ids, step(there))
    assert ids.values() is there["inner"][0]
    assert ids.weights_or_none() is there.get("weights")


def test_made_of_the_parts_of_a_jagged_tensor() -> None:
    def step(batch: dict[str, Any]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["x"], batch["jagged"].values(), lengths=batch["jagged"].lengths())

    here, there = ({"jagged": JaggedTensor(torch.arange(n), lengths=torch.tensor([1, n - 1]))} for n in (3, 5))
    path = find_path(here, step(here))
    assert path is not None
    ids = follow(there, path)
    assert ids is not None and same_features(ids, step(there))


@pytest.mark.parametrize(
    "batch",
    [
        {"values": lambda f: f.values()},
        {"lengths": lambda f: f.lengths()},
        {"values": lambda f: f.values().clone(), "lengths": lambda f: f.lengths()},
        {"values": lambda f: f.values()[:-1], "lengths": lambda f: f.lengths()},
        {"values": lambda f: f.values().view(-1, 1), "lengths": lambda f: f.lengths()},
        {"values": lambda f: f.values().view(torch.float64), "lengths": lambda f: f.lengths()},
        {"values": lambda f: f.values(), "lengths": lambda f: f.lengths(), "weights": lambda f: f.weights().clone()},
        {"values": lambda f: f.values().numpy(), "lengths": lambda f: f.lengths()},
    ],
)
def test_not_made_of_the_batch(batch: dict[str, Callable[[KeyedJaggedTensor], Any]]) -> None:
    features = _features(0, weighted="weights" in batch)
    assert find_path({name: part(features) for name, part in batch.items()}, features) is None


def test_empty_tensors_are_found_as_themselves_only() -> None:
    def empty() -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64)

    here = KeyedJaggedTensor(KEYS, empty(), lengths=torch.zeros(4, dtype=torch.int64))
    other = {"other": empty(), "lengths": here.lengths()}
    assert find_path(other, here) is None
    path = find_path({**other, "values": here.values()}, here)
    assert path is not None and dict(path.parts)["values"][0].key == "values"


def test_variable_strides_are_never_made_but_found() -> None:
    strides = [[2], [1]]
    here = KeyedJaggedTensor(KEYS, torch.arange(5), lengths=torch.tensor([1, 2, 2]), stride_per_key_per_rank=strides)
    parts = {"values": here.values(), "lengths": here.lengths()}
    assert find_path(parts, here) is None
    assert find_path({"ids": here}, here) is not None
    assert same_features(here, here)
    plain = KeyedJaggedTensor(KEYS, here.values(), lengths=here.lengths(), stride=1)
    assert not same_features(here, plain)
    assert not Captured(plain).matches(here)


def test_a_batch_without_that_place() -> None:
    ids, label = _features(), LABEL
    path = find_path({"a": [label, ids]}, ids)
    assert path is not None
    batches = [{}, {"a": [label]}, {"a": [label, label]}, {"a": {1: label}}, {"b": [label, ids]}, None, label, {"a": None}, []]
    assert [follow(batch, path) for batch in batches] == [None] * len(batches)
    missing = defaultdict(list)
    assert follow(missing, path) is None and not missing
    tensors = {"values": ids.values(), "lengths": ids.lengths()}
    made = find_path(tensors, _rewrapped(ids))
    assert made is not None and made.whole is None
    assert follow({"values": ids.values()}, made) is None
    assert follow({"values": ids.values(), "lengths": [1, 2]}, made) is None
    attribute = find_path(Record(label, ids), ids)
    assert attribute is not None and follow(Record(label, None), attribute) is None
    assert follow({"inputs": ids}, attribute) is None


def test_does_not_look_into_modules_or_forever() -> None:
    ids = _features()
    module = nn.Identity()
    module.ids = ids
    assert find_path({"module": module}, ids) is None
    deep: Any = ids
    for _ in range(30):
        deep = [deep]
    assert find_path(deep, ids) is None
    cycle: dict[str, Any] = {"ids": ids}
    cycle["cycle"] = [cycle]
    assert find_path(cycle["cycle"], ids) is not None
    wide: list[Any] = []
    wide.extend([wide] * 50)
    assert find_path(wide, ids) is None


# -- the same ids


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_same_contents(weighted: bool, offsets: bool) -> None:
    here = _features(0, weighted, offsets)
    assert same_features(here, here)
    assert same_features(here, _copy(here))
    assert same_features(here, _features(0, weighted, not offsets))
    assert not same_features(here, _features(1, weighted, offsets))
    assert not same_features(here, _features(0, not weighted, offsets))


@pytest.mark.parametrize(
    "other",
    [
        lambda f: KeyedJaggedTensor(KEYS[::-1], f.values(), f.weights(), lengths=f.lengths()),
        lambda f: KeyedJaggedTensor([*KEYS, "more"], f.values(), f.weights(), lengths=f.lengths()),
        lambda f: KeyedJaggedTensor(KEYS, f.values().flip(0), f.weights(), lengths=f.lengths()),
        lambda f: KeyedJaggedTensor(KEYS, f.values().int(), f.weights(), lengths=f.lengths()),
        lambda f: KeyedJaggedTensor(KEYS, f.values(), f.weights() + 1, lengths=f.lengths()),
        lambda f: KeyedJaggedTensor(KEYS, f.values(), f.weights(), lengths=f.lengths().flip(0)),
        lambda f: KeyedJaggedTensor(KEYS, f.values(), f.weights(), lengths=f.lengths().view(2, 3)),
    ],
)
def test_one_difference_is_enough(other: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> None:
    features = _features(0, weighted=True)
    assert not torch.equal(features.lengths(), features.lengths().flip(0))
    assert not same_features(features, other(features)) and not same_features(other(features), features)
    assert not Captured(features).matches(other(features))


def test_shared_memory_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = _features(0, weighted=True), _copy(_features(0, weighted=True))

    def refuse(*args: Any) -> bool:
        raise AssertionError

    monkeypatch.setattr(torch, "equal", refuse)
    assert same_features(here, _rewrapped(here))
    assert Captured(here).matches(here)
    by_offsets = _features(0, offsets=True)
    with_lengths = _rewrapped(by_offsets)
    with_lengths.lengths()
    assert same_features(by_offsets, with_lengths)
    with pytest.raises(AssertionError):
        same_features(here, other)


@pytest.mark.parametrize("part", ["values", "weights", "lengths"])
@pytest.mark.parametrize("passed", ["itself", "rewrapped", "copied before", "copied after"])
def test_a_change_in_place_is_no_match(part: str, passed: str) -> None:
    features = _features(0, weighted=True)
    captured, before = Captured(features), _copy(features)
    assert captured.matches(features) and captured.matches(before)
    getattr(features, part)().add_(0)
    others = {
        "itself": features,
        "rewrapped": _rewrapped(features),
        "copied before": before,
        "copied after": _copy(features),
    }
    assert not captured.matches(others[passed])


def test_a_change_before_the_capture_does_not_matter() -> None:
    features = _features()
    features.values().add_(1)
    assert Captured(features).matches(features)


def test_what_was_captured_stays_when_the_object_is_given_other_tensors() -> None:
    features = _features(0)
    captured, before = Captured(features), _copy(features)
    features._values = features.values() + 1
    assert not captured.matches(features) and captured.matches(before)


def test_lengths_that_are_computed_later_do_not_matter() -> None:
    features = _features(0, offsets=True)
    captured = Captured(features)
    features.lengths(), features.to_dict()
    assert captured.matches(features) and captured.matches(_features(0))


def test_ids_whose_changes_torch_does_not_count_never_match() -> None:
    with torch.inference_mode():
        features = _copy(_features())
    assert not Captured(features).matches(features)


# -- when to stop trying


def _learned() -> tuple[Probe, KeyedJaggedTensor]:
    probe, ids = Probe("net.tables"), _features()
    assert probe.mode == "probe" and not probe.known and probe.ids_of({"ids": ids}) is None
    probe.learn({"ids": ids}, ids)
    assert probe.known
    return probe, ids


def test_learns_and_tells() -> None:
    probe, _ = _learned()
    there = _features(1)
    assert probe.ids_of({"ids": there}) is there
    for _ in range(5):
        probe.report(True)
    assert probe.mode == "probe"


def test_two_collections_in_one_batch() -> None:
    batch = {"user": _features(0), "item": _features(1)}
    probes = {name: Probe(name) for name in batch}
    for name, probe in probes.items():
        probe.learn(batch, batch[name])
    later = {"user": _features(2), "item": _features(3)}
    assert {name: probe.ids_of(later) for name, probe in probes.items()} == later


def test_nothing_found_is_a_case_for_a_ghost() -> None:
    probe = Probe("net.tables")
    probe.learn({"label": LABEL}, _features())
    assert probe.mode == "ghost" and not probe.known
    assert probe.ids_of({"ids": _features()}) is None
    probe.learn({"ids": (ids := _features())}, ids)
    assert probe.mode == "ghost", "it stays one"


def _miss(probe: Probe) -> None:
    probe.report(False)


def _no_place(probe: Probe) -> None:
    assert probe.ids_of({"elsewhere": LABEL}) is None


@pytest.mark.parametrize("fail", [_miss, _no_place])
def test_three_failures_in_a_row_end_a_probe(fail: Callable[[Probe], None]) -> None:
    probe, _ = _learned()
    for failures in (2, 2, 3):
        probe.report(True)
        assert probe.mode == "probe"
        for _ in range(failures):
            fail(probe)
    assert probe.mode == "ghost" and not probe.known


def test_learns_another_place_and_keeps_the_old_one_if_there_is_none() -> None:
    probe, ids = _learned()
    probe.learn({"other": ids}, ids)
    assert probe.ids_of({"other": ids}) is ids
    probe.learn({"label": LABEL}, ids)
    assert probe.mode == "probe" and probe.ids_of({"other": ids}) is ids


def test_a_place_that_moves_with_every_batch_ends_a_probe_too() -> None:
    probe, ids = _learned()
    for step in range(3):
        batch = {f"step {step}": ids}
        assert probe.ids_of(batch) is None
        probe.learn(batch, ids)
    assert probe.mode == "ghost"


def test_three_failures_in_a_row_end_a_ghost_with_one_warning() -> None:
    probe = Probe("net.tables")
    probe.learn({"label": LABEL}, _features())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for matched in (False, False, True, False, False):
            probe.report(matched)
    assert probe.mode == "ghost"
    with pytest.warns(UserWarning, match="do not stand in the batch; a trial run of training_step looks up others") as caught:
        probe.report(False)
    assert probe.mode == "none" and "'net.tables'" in str(caught[0].message)
    assert "its exchange is not overlapped" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            probe.report(False)
        probe.give_up("again")
        probe.learn({"ids": (ids := _features())}, ids)
    assert probe.mode == "none" and not probe.known


def test_a_ghost_that_sees_nothing_ends_at_once() -> None:
    probe = Probe("net.tables")
    probe.learn({"label": LABEL}, _features())
    with pytest.warns(UserWarning, match="training_step raised KeyError") as caught:
        probe.give_up("training_step raised KeyError")
    assert probe.mode == "none" and len(caught) == 1


def test_failures_of_the_probe_are_not_counted_against_the_ghost() -> None:
    probe, _ = _learned()
    for _ in range(3):
        probe.report(False)
    probe.report(False)
    probe.report(False)
    assert probe.mode == "ghost"
