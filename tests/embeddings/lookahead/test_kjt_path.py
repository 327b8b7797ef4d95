"""Paths to the ids in a batch."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.id_prediction import find_path, follow_path
from lightning_freescale.embeddings.overlap.module_forward import without_weights
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
    """A plain object with a reference to itself."""

    def __init__(self, inputs: Any) -> None:
        self.me, self.inputs, self.name = self, inputs, "holder"


BATCHES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda ids: ids,
    "dict": lambda ids: {"label": LABEL, "ids": ids},
    "ordered": lambda ids: OrderedDict(label=LABEL, ids=ids),
    "mapping": lambda ids: UserDict(label=LABEL, ids=ids),
    "number as key": lambda ids: {0: LABEL, 1: ids},
    "list": lambda ids: [LABEL, None, ids],
    "named tuple": lambda ids: Pair(LABEL, ids),
    "data class": lambda ids: Record(LABEL, ids),
    "slots": lambda ids: Slotted(LABEL, ids),
    "nested": lambda ids: {"a": [Record(LABEL, Pair({"x": LABEL}, Holder((ids,))))]},
    "long list before": lambda ids: {"names": [str(n) for n in range(50_000)], "more": [[ids]]},
}


@pytest.mark.parametrize("kind", BATCHES)
def test_the_object_itself(kind: str) -> None:
    make, here, there = BATCHES[kind], make_features(0), make_features(1)
    path = find_path(make(here), here)
    assert path is not None
    assert follow_path(make(there), path) is there
    assert find_path(make(here), there) is None


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_another_object_over_the_same_memory(weighted: bool, offsets: bool) -> None:
    here, there = make_features(0, weighted, offsets), make_features(1)
    path = find_path({"wrong": make_features(3, weighted, offsets), "ids": here}, without_weights(rewrapped(here)))
    assert path is not None and path.whole is not None
    assert follow_path({"wrong": here, "ids": there}, path) is there
    path = find_path({"other": rewrapped(here), "ids": here}, here)
    assert path is not None
    assert follow_path({"other": there, "ids": here}, path) is here, "the object itself comes first"


def test_the_same_memory_under_other_keys_is_another() -> None:
    here = make_features(0)
    values, lengths = here.values(), here.lengths()
    for batch in (
        KeyedJaggedTensor(["x", "y"], values, lengths=lengths),
        KeyedJaggedTensor(list(KEYS), values, lengths=lengths.clone()),
        KeyedJaggedTensor(list(KEYS), values.clone(), lengths=lengths),
    ):
        path = find_path({"ids": batch}, here)
        assert path is None or path.whole is None


# -- built in the step

MADE: dict[str, Callable[..., KeyedJaggedTensor]] = {
    "lengths": lambda values, jagged: KeyedJaggedTensor(KEYS, values, lengths=jagged),
    "offsets": lambda values, jagged: KeyedJaggedTensor(KEYS, values, offsets=jagged),
    "lengths sync": lambda values, jagged: KeyedJaggedTensor.from_lengths_sync(KEYS, values, jagged),
    "offsets sync": lambda values, jagged: KeyedJaggedTensor.from_offsets_sync(KEYS, values, jagged),
}


@pytest.mark.parametrize("kind", MADE)
def test_made_of_tensors_in_the_batch(kind: str) -> None:
    def batch(seed: int) -> dict[str, Any]:
        features = make_features(seed)
        jagged = features.lengths() if kind.startswith("lengths") else features.offsets()
        return {"label": LABEL, "inner": [features.values(), jagged]}

    def step(batch: dict[str, Any]) -> KeyedJaggedTensor:
        made = MADE[kind](*batch["inner"])
        made.lengths(), made.offsets()  # computes them after the lookup
        return made

    here, there = batch(0), batch(1)
    path = find_path(here, step(here))
    assert path is not None and path.whole is None
    ids = follow_path(there, path)
    assert ids is not None and ids.keys() == KEYS and ids.keys() is not KEYS
    assert same_features(ids, step(there))
    assert ids.values() is there["inner"][0]


def test_not_made_of_the_batch() -> None:
    f = make_features(0)
    values, lengths = f.values(), f.lengths()
    batches = {
        "no lengths": {"values": values},
        "no values": {"lengths": lengths},
        "a copy": {"values": values.clone(), "lengths": lengths},
        "a part": {"values": values[:-1], "lengths": lengths},
        "another shape": {"values": values.view(-1, 1), "lengths": lengths},
        "another type": {"values": values.view(torch.float64), "lengths": lengths},
        "no tensor": {"values": values.numpy(), "lengths": lengths},
    }
    assert [name for name, batch in batches.items() if find_path(batch, f) is not None] == []


def test_empty_tensors_are_found_as_themselves_only() -> None:
    here = KeyedJaggedTensor(KEYS, torch.empty(0).long(), lengths=torch.zeros(4, dtype=torch.int64))
    other = {"other": torch.empty(0).long(), "lengths": here.lengths()}
    assert find_path(other, here) is None
    path = find_path({**other, "values": here.values()}, here)
    assert path is not None and dict(path.tensors)["values"][0].key == "values"


def test_variable_strides_are_never_made_but_found() -> None:
    here = KeyedJaggedTensor(KEYS, torch.arange(5), lengths=torch.tensor([1, 2, 2]), stride_per_key_per_rank=[[2], [1]])
    assert find_path({"values": here.values(), "lengths": here.lengths()}, here) is None
    assert find_path({"ids": here}, here) is not None
    plain = KeyedJaggedTensor(KEYS, here.values(), lengths=here.lengths(), stride=1)
    assert same_features(here, here) and not same_features(here, plain) and not same_features(plain, here)


# -- of an nn.Embedding

CUTS: dict[str, Callable[[Tensor], Tensor]] = {
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


def test_other_ids_of_an_embedding_are_not_found() -> None:
    items = torch.arange(12).view(3, 4)
    made = {
        "a copy": items.clone(),
        "every other": items[:, ::2],
        "transposed": items.T,
        "of other dimensions": items.flatten()[1:],
        "a column": items[:, 0],
        "of another type": items.view(torch.int32)[:, :2],
        "computed": items + 1,
        "none": items[:0],
    }
    batch = {"items": items, "empty": torch.empty(0, 4), "expanded": LABEL.expand(2, 3)}
    assert [name for name, ids in made.items() if find_path(batch, EmbeddingIds("emb", ids)) is not None] == []
    items = torch.arange(24).view(4, 6)  # a part that extends beyond the tensor is not a slice
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
    made = find_path({"values": ids.values(), "lengths": ids.lengths()}, rewrapped(ids))
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
