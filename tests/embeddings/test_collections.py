"""The search for collections, and the refusal of those that would not be the same when they are sharded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection

from lightning_freescale.embeddings.collection_kinds import LARGE_EMBEDDING, check_replicas
from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.plain_embedding import (
    choose_embeddings,
)
from tests.helpers.managed_tables import managed_collection
from tests.helpers.recommender import tables

ROWS = LARGE_EMBEDDING // 8


class Own(EmbeddingCollection):
    """A subclass that changes only how the collection is built."""

    def __init__(self) -> None:
        super().__init__(tables=tables())
        self.width = 8


class Doubled(EmbeddingBagCollection):
    def forward(self, features: Any) -> Any:
        return super().forward(features).values() * 2


class Gated(EmbeddingBagCollection):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = nn.Parameter(torch.ones(3))


class Constant(EmbeddingBagCollection):
    SCALE = 2.0

    @staticmethod
    def scaled(values: Tensor) -> Tensor:
        return 2 * values


class OtherTable(EmbeddingBagCollection):
    def __init__(self, mode: str = "sum", padding_idx: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        rows = self.embedding_bags["bag"].num_embeddings
        self.embedding_bags["bag"] = nn.EmbeddingBag(rows, 4, mode=mode, padding_idx=padding_idx, include_last_offset=True)


class OwnBag(nn.EmbeddingBag):
    pass


def _after(module: Any, act: Callable[[Any], Any]) -> Any:
    act(module)
    return module


def _bags(rows: int = 5, kind: Any = EmbeddingBagCollection, **options: Any) -> Any:
    config = EmbeddingBagConfig(name="bag", num_embeddings=rows, embedding_dim=4, feature_names=["history"])
    return kind(tables=[config], **options)


class Root(nn.Module):
    """A module that has a collection twice, and collections of all kinds that can be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.items = EmbeddingCollection(tables=tables(), need_indices=True)
        self.bags = _bags()
        self.again = nn.ModuleList([self.items])
        self.managed = managed_collection()
        self.own = Own()
        positions = PositionWeightedModuleCollection({"history": 3})
        self.processed = FeatureProcessedEmbeddingBagCollection(_bags(is_weighted=True), positions)


def test_every_collection_is_found_once_with_all_its_places() -> None:
    root = Root()
    found = {collection.path: collection for collection, _ in find_collections(root)}
    assert list(found) == ["items", "bags", "managed", "own", "processed._embedding_bag_collection"]
    assert found["items"].names("embeddings") == ("items.embeddings", "again.0.embeddings")
    managed = [f"managed._embedding_module.embeddings.{name}.weight" for name in ("item", "user")]
    assert [table.key for table in found["managed"].tables] == managed
    kinds = [(c.pooled, c.managed, c.need_indices) for c in found.values()][:3]
    assert kinds == [(False, False, True), (True, False, False), (False, True, False)]
    assert [c.attributes for c in found.values()] == [(), (), (), ("width",), ()]
    assert check_replicas(root, _held(root)) == []


def _held(root: nn.Module, paths: Any = ()) -> set[nn.Module]:
    embeddings = set(choose_embeddings(root, paths).chosen.values())
    return {each for _, module in find_collections(root, embeddings) for each in module.modules()}


REPLICATED: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "another forward": (lambda rows: _bags(rows, Doubled), r"Doubled with {} values, which overrides or adds \['forward'\]"),
    "a parameter": (lambda rows: _bags(rows, Gated), r"Gated with {} values, which overrides or adds \['gate'\]"),
    "members": (lambda rows: _bags(rows, Constant), r"Constant with {} values, which .*\['SCALE', 'scaled'\]"),
    "a changed table": (
        lambda rows: _bags(rows, OtherTable, mode="mean", padding_idx=0),
        r"OtherTable with {} values, which .*\['embedding_bags.bag.mode', 'embedding_bags.bag.padding_idx'\]",
    ),
    "a table of another class": (
        lambda rows: _after(_bags(rows), lambda bags: bags.embedding_bags.update({"bag": OwnBag(rows, 4, mode="sum")})),
        r"EmbeddingBagCollection with {} values, which .*\['embedding_bags.bag.OwnBag'\]",
    ),
    "pruned": (lambda rows: ITEPEmbeddingBagCollection(_bags(rows), nn.Module()), "ITEPEmbeddingBagCollection with {} values"),
    "fused": (
        lambda rows: _bags(rows, FusedEmbeddingBagCollection, optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}),
        "FusedEmbeddingBagCollection with {} values",
    ),
}


@pytest.mark.parametrize("kind", REPLICATED)
def test_other_collections_are_replicated_if_small_and_refused_if_large(kind: str) -> None:
    make, text = REPLICATED[kind]
    for rows in (5, LARGE_EMBEDDING // 4):
        root, values = nn.ModuleDict({"net": nn.ModuleDict({"own": make(rows)})}), 4 * rows + 3 * (kind == "a parameter")
        expected = f"embedding collection 'net.own' is an? {text.format(values)}.*cannot be sharded. "
        if rows == 5:
            (found,) = check_replicas(root, _held(root))
            assert re.match(f"{expected}It is replicated as with 'ddp'", found)
        else:
            with pytest.raises(ValueError, match=f"{expected}Every rank .*Use torchrec.EmbeddingCollection or"):
                check_replicas(root, _held(root))
    if kind == "another forward":
        assert check_replicas(root, _held(root, ["net.own.embedding_bags.bag"])) == []


class Wrapped(EmbeddingBagCollectionInterface):
    """A collection of the user around TorchRec's, with large layers after it."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.layers = _bags(), nn.Linear(1000, LARGE_EMBEDDING // 1000, device="meta")

    def forward(self, features: Any) -> Any:
        return self.layers(self.bags(features).values())

    def embedding_bag_configs(self) -> Any:
        return self.bags.embedding_bag_configs()

    def is_weighted(self) -> bool:
        return False


def test_only_tables_are_replicated_collections() -> None:
    root = nn.ModuleDict({"net": Wrapped()})
    assert check_replicas(root, _held(root)) == []
    root["net"].bags = nn.EmbeddingBag(LARGE_EMBEDDING, 1, device="meta")
    with pytest.raises(ValueError, match=f"'net' is a Wrapped with {LARGE_EMBEDDING} values"):
        check_replicas(root, set())


HOOKED: dict[str, Any] = {
    "bags._forward_hooks": lambda root: root.bags.register_forward_hook(lambda *args: None),
    "items._forward_pre_hooks": lambda root: root.items.register_forward_pre_hook(lambda *args: None),
    "own.embeddings.cat._backward_hooks": lambda root: root.own.embeddings.cat.register_full_backward_hook(print),
    "managed._backward_pre_hooks": lambda root: root.managed.register_full_backward_pre_hook(print),
}


@pytest.mark.parametrize("name", HOOKED)
def test_collections_with_hooks_are_refused(name: str) -> None:
    root = Root()
    HOOKED[name](root)
    with pytest.raises(ValueError, match=rf"'{name.split('.')[0]}' has hooks \['{name}'\].*Remove them"):
        find_collections(root)


def test_a_collection_by_itself_has_names_without_a_path() -> None:
    ((collection, module),) = find_collections(EmbeddingCollection(tables=tables()))
    assert [table.key for table in collection.tables] == ["embeddings.item.weight", "embeddings.cat.weight"]
    assert set(module.state_dict()) == set(collection.blueprint().state_dict())
