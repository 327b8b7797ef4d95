"""What a function of the user may return, and what is said of anything else."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from typing import Any

import pytest
import torch

from lightning_freescale.embeddings.lookahead.ids_function import IdsFunction
from lightning_freescale.embeddings.plain_embedding import EmbeddingIds
from tests.helpers.jagged import make_features, same_features

IDS = make_features()


def _ids(
    told: Any, overlapped: tuple[str, ...] = ("net.items",), plain: tuple[str, ...] = (), embeddings: tuple[str, ...] = ()
) -> dict[str, Any]:
    return IdsFunction(lambda batch: told, "my_function", overlapped, plain, embeddings)({"any": "batch"})


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
    ("told", "kind", "parts"),
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
def test_refused(told: Any, kind: type[Exception], parts: str) -> None:
    with pytest.raises(kind, match=f"my_function.*{parts}"):
        _ids(told, ("item_emb", "tags"), embeddings=("item_emb",))


def test_its_own_error_comes_with_its_traceback_and_a_note() -> None:
    def broken(batch: Any) -> Any:
        return batch["nothing"]

    with pytest.raises(KeyError, match="nothing") as raised:
        IdsFunction(broken, "my_function", ["net.items"])({})
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "broken"
    assert "my_function" in raised.value.__notes__[0]
