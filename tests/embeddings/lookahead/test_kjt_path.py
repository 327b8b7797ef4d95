"""Where in a batch the ids are."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_path import find_path, follow_path
from lightning_freescale.embeddings.lookahead.kjt_snapshot import KJTSnapshot
from lightning_freescale.embeddings.plain_embedding import EmbeddingIds
from tests.helpers.jagged import KEYS, LABEL, make_features, rewrapped, same_features


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
    make, here, there = BATCHES[kind], make_features(0, weighted), make_features(1, weighted)
    path = find_path(make(here), here)
    assert path is not None
    assert follow_path(make(there), path) is there
    assert find_path(make(here), there) is None


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_another_object_over_the_same_memory(weighted: bool, offsets: bool) -> None:
    here = make_features(0, weighted, offsets)
    path = find_path({"wrong": make_features(3, weighted, offsets), "ids": here}, rewrapped(here))
    assert path is not None and path.whole is not None
    there = make_features(1)
    assert follow_path({"wrong": here, "ids": there}, path) is there


def test_the_object_itself_comes_before_another_over_its_memory() -> None:
    here = make_features()
    path = find_path({"other": rewrapped(here), "ids": here}, here)
    assert path is not None
    assert follow_path({"other": make_features(1), "ids": here}, path) is here


def test_the_same_memory_under_other_keys_or_weights_is_another() -> None:
    here = make_features(0, weighted=True)
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
    features = make_features(seed, weighted)
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
    ids = follow_path(there, path)
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
    ids = follow_path(there, path)
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
    features = make_features(0, weighted="weights" in batch)
    assert find_path({name: part(features) for name, part in batch.items()}, features) is None


def test_empty_tensors_are_found_as_themselves_only() -> None:
    def empty() -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64)

    here = KeyedJaggedTensor(KEYS, empty(), lengths=torch.zeros(4, dtype=torch.int64))
    other = {"other": empty(), "lengths": here.lengths()}
    assert find_path(other, here) is None
    path = find_path({**other, "values": here.values()}, here)
    assert path is not None and dict(path.tensors)["values"][0].key == "values"


def test_variable_strides_are_never_made_but_found() -> None:
    strides = [[2], [1]]
    here = KeyedJaggedTensor(KEYS, torch.arange(5), lengths=torch.tensor([1, 2, 2]), stride_per_key_per_rank=strides)
    parts = {"values": here.values(), "lengths": here.lengths()}
    assert find_path(parts, here) is None
    assert find_path({"ids": here}, here) is not None
    assert same_features(here, here)
    plain = KeyedJaggedTensor(KEYS, here.values(), lengths=here.lengths(), stride=1)
    assert not same_features(here, plain)
    assert not KJTSnapshot(plain).matches(here)


# -- of an nn.Embedding


CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda items: items,
    "in another shape": lambda items: items.view(-1, 2),
    "but the last": lambda items: items[:, :-1],
    "but the first": lambda items: items[:, 1:],
    "both": lambda items: items[1:, 2:-1],
}


@pytest.mark.parametrize("cut", CUTS)
def test_ids_of_an_embedding_are_a_tensor_or_a_slice_of_one(cut: str) -> None:
    here, there = (torch.arange(n * (n + 1)).view(n, n + 1) for n in (4, 6))
    path = find_path({"label": LABEL, "other": here.clone(), "items": [here]}, EmbeddingIds("emb", CUTS[cut](here)))
    assert path is not None
    ids = follow_path({"label": LABEL, "other": here, "items": [there]}, path)
    assert isinstance(ids, EmbeddingIds) and torch.equal(ids.ids.flatten(), CUTS[cut](there).flatten())
    assert same_features(ids, EmbeddingIds("emb", CUTS[cut](there)))
    assert not path.slices or follow_path({"items": [there[0, 0]]}, path) is None
    assert follow_path({"items": [None]}, path) is None


@pytest.mark.parametrize(
    "made",
    [
        lambda items: items.clone(),
        lambda items: items[:, ::2],
        lambda items: items.T,
        lambda items: items.flatten()[1:],
        lambda items: items[:, 0],
        lambda items: items.view(torch.int32)[:, :2],
        lambda items: items + 1,
        lambda items: items[:0],
    ],
)
def test_other_ids_of_an_embedding_are_not_found(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    items = torch.arange(12).view(3, 4)
    assert (
        find_path(
            {"items": items, "empty": torch.empty(0, 4), "expanded": LABEL.expand(2, 3)}, EmbeddingIds("emb", made(items))
        )
        is None
    )


def test_a_part_that_reaches_beyond_is_no_slice() -> None:
    items = torch.arange(24).view(4, 6)
    assert find_path({"items": items[:, :3]}, EmbeddingIds("emb", items[:, 1:4])) is None
    assert find_path({"items": items[1:]}, EmbeddingIds("emb", items[:2])) is None


def test_a_batch_without_that_place() -> None:
    ids, label = make_features(), LABEL
    path = find_path({"a": [label, ids]}, ids)
    assert path is not None
    batches = [{}, {"a": [label]}, {"a": [label, label]}, {"a": {1: label}}, {"b": [label, ids]}, None, label, {"a": None}, []]
    assert [follow_path(batch, path) for batch in batches] == [None] * len(batches)
    missing = defaultdict(list)
    assert follow_path(missing, path) is None and not missing
    tensors = {"values": ids.values(), "lengths": ids.lengths()}
    made = find_path(tensors, rewrapped(ids))
    assert made is not None and made.whole is None
    assert follow_path({"values": ids.values()}, made) is None
    assert follow_path({"values": ids.values(), "lengths": [1, 2]}, made) is None
    attribute = find_path(Record(label, ids), ids)
    assert attribute is not None and follow_path(Record(label, None), attribute) is None
    assert follow_path({"inputs": ids}, attribute) is None


def test_does_not_look_into_modules_or_forever() -> None:
    ids = make_features()
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
