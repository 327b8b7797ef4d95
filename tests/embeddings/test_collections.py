"""Which collections of a module are found, and where."""

from __future__ import annotations

from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from lightning_freescale.embeddings.collections import find_collections, unsupported_collections
from tests.helpers.managed_tables import managed_collection
from tests.helpers.recommender import tables


class Own(EmbeddingCollection):
    """A subclass may do anything."""


def _bags(weighted: bool = False) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(name="bag", num_embeddings=5, embedding_dim=4, feature_names=["history"])
    return EmbeddingBagCollection(tables=[config], is_weighted=weighted)


class Root(nn.Module):
    """Holds a collection twice, and some that cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.items = EmbeddingCollection(tables=tables(), need_indices=True)
        self.bags = _bags()
        self.again = nn.ModuleList([self.items])
        self.managed = managed_collection()
        self.own = Own(tables=tables())
        positions = PositionWeightedModuleCollection({"history": 3})
        self.processed = FeatureProcessedEmbeddingBagCollection(_bags(weighted=True), positions)


def test_every_collection_is_found_once_with_all_its_places() -> None:
    found = {collection.path: collection for collection, _ in find_collections(Root())}
    assert list(found) == ["items", "bags", "managed"]
    assert found["items"].names("embeddings") == ("items.embeddings", "again.0.embeddings")
    assert [table.key for table in found["managed"].tables] == [
        f"managed._embedding_module.embeddings.{name}.weight" for name in ("item", "user")
    ]
    told = [(c.pooled, c.managed, c.need_indices) for c in found.values()]
    assert told == [(False, False, True), (True, False, False), (False, True, False)]


def test_what_stays_replicated_is_listed() -> None:
    root = Root()
    assert unsupported_collections(root, find_collections(root)) == ["own", "processed._embedding_bag_collection"]


def test_a_collection_by_itself_has_names_without_a_path() -> None:
    ((collection, module),) = find_collections(EmbeddingCollection(tables=tables()))
    assert [table.key for table in collection.tables] == ["embeddings.item.weight", "embeddings.cat.weight"]
    assert set(module.state_dict()) == set(collection.blueprint().state_dict())
