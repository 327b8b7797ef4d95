"""Managed collisions: what is refused, and what else must go on working with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.id_checks import check_num_embeddings
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.managed_tables import (
    CPU,
    DIM,
    MANAGED,
    ManagedBatches,
    ManagedRecommender,
    managed_collection,
    managed_tables,
)
from tests.helpers.recommender import trainer


class Own(ManagedCollisionEmbeddingCollection):
    """A subclass."""


class OwnManager(MCHManagedCollisionModule):
    """A map that may keep anything."""


class OwnTables(EmbeddingCollection):
    """Tables that may be anything."""


def _manager(kind: Any = MCHManagedCollisionModule, rows: int = 32) -> Any:
    return kind(rows, CPU, eviction_policy=LFU_EvictionPolicy(), eviction_interval=2)


def _own_collection() -> nn.Module:
    plain = managed_collection()
    return Own(plain._embedding_module, plain._managed_collision_collection)


def _own_tables() -> nn.Module:
    tables = OwnTables(tables=managed_tables())
    return ManagedCollisionEmbeddingCollection(
        tables, managed_collection(tables.embedding_configs())._managed_collision_collection
    )


def _own_manager() -> nn.Module:
    configs = managed_tables()
    maps = {"item": _manager(OwnManager), "user": _manager(rows=20)}
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=configs), ManagedCollisionCollection(maps, configs))


def _bag() -> nn.Module:
    configs = [EmbeddingBagConfig(name="item", num_embeddings=32, embedding_dim=DIM, feature_names=["history"])]
    maps = ManagedCollisionCollection({"item": _manager()}, configs)
    return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables=configs), maps)


def _shared_feature() -> nn.Module:
    configs = [
        EmbeddingConfig(name=name, num_embeddings=32, embedding_dim=DIM, feature_names=["history"]) for name in ("item", "user")
    ]
    return managed_collection(configs)


def _few_rows() -> nn.Module:
    return managed_collection([EmbeddingConfig(name="item", num_embeddings=1, embedding_dim=DIM, feature_names=["history"])])


def _hashed(evicts: bool = True) -> nn.Module:
    configs = managed_tables()
    eviction: dict[str, Any] = {
        "eviction_policy_name": HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
        "eviction_config": HashZchEvictionConfig(features=["history", "candidate", "user"], single_ttl=1),
    }
    maps: dict[str, Any] = {
        config.name: HashZchManagedCollisionModule(
            config.num_embeddings, CPU, total_num_buckets=4, **(eviction if evicts else {})
        )
        for config in configs
    }
    tables = EmbeddingCollection(tables=configs)
    return ManagedCollisionEmbeddingCollection(tables, ManagedCollisionCollection(maps, configs), return_remapped_features=True)


def _fit(items: nn.Module, strategy: Any = "freescale", steps: int = 2) -> ManagedRecommender:
    module = ManagedRecommender()
    module.net.items = items
    trainer(strategy=strategy, devices=int(os.environ["WORLD_SIZE"])).fit(
        module, ManagedBatches(int(os.environ["RANK"]), steps)
    )
    return module


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_own_collection, r"'net.items' \(Own\).*shards torchrec's ManagedCollisionEmbeddingCollection only"),
        (_own_tables, r"'net.items'.*its collection is a OwnTables, use a plain torchrec.EmbeddingCollection"),
        (_own_manager, r"'net.items'.*table 'item' is a OwnManager, use one of \['MCHManaged"),
        (_bag, r"'net.items' \(ManagedCollisionEmbeddingBagCollection\).*pool what it returns"),
        (
            lambda: managed_collection()._managed_collision_collection,
            r"'net.items' \(ManagedCollisionCollection\).*Put the map",
        ),
        (_manager, r"'net.items' \(MCHManagedCollisionModule\).*Put the map into one"),
        (_shared_feature, r"'net.items'.*feature 'history' looks up table 'item' and table 'user', give it one"),
        (_few_rows, r"table 'item' of collection 'net.items' .*num_embeddings=1, .* one of 2 ranks .* give it more"),
        (
            _hashed,
            r"table 'item' of collection 'net.items' .*zero_collision_hash neither adds nor evicts ids on CPU: use a GPU",
        ),
    ],
)
def test_refused(build: Any, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_distributed(lambda: _fit(build()), 2)


def _planned(sharding_type: str, kernel: str) -> None:
    """A plan made for row-wise sharding, whose entry for one table then says otherwise."""
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder

    module = ManagedRecommender()
    sharder: Any = ManagedCollisionEmbeddingCollectionSharder()
    placed: Any = construct_module_sharding_plan(
        module.net.items,
        {config.name: row_wise(compute_kernel="fused") for config in managed_tables()},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    placed["user"].sharding_type, placed["user"].compute_kernel = sharding_type, kernel
    _fit(module.net.items, FreeScaleStrategy(plan=ShardingPlan({"net.items": placed, "net.categories": placed})))


@pytest.mark.parametrize(
    ("sharding_type", "kernel", "message"),
    [
        ("table_wise", "fused", "table 'user' sharding_type='table_wise'.*use row_wise"),
        ("row_wise", "fused_uvm_caching", "table 'user' compute_kernel='fused_uvm_caching'.*use \"fused\" or"),
    ],
)
def test_plan_is_refused(sharding_type: str, kernel: str, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_distributed(_planned, 2, sharding_type, kernel)


def _evaluate() -> tuple[list[float], list[float], dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    module = _fit(managed_collection(), steps=5)
    batches, states = ManagedBatches(int(os.environ["RANK"]), 3), []
    module.losses = []
    for _ in range(2):
        fit = trainer(devices=2)
        fit.validate(module, batches, verbose=False)
        states.append(fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"])
    return module.losses[:3], module.losses[3:], *states


def test_validation_leaves_the_maps_alone() -> None:
    first, second, before, after = run_distributed(_evaluate, 2)[0]
    assert first == second
    assert any("_mch_sorted_raw_ids" in name for name in before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def _on_meta() -> dict[str, Any]:
    with torch.device("meta"):
        tables = EmbeddingCollection(tables=managed_tables(), device=torch.device("meta"))
    maps = managed_collection(tables.embedding_configs())._managed_collision_collection
    module = _fit(ManagedCollisionEmbeddingCollection(tables, maps, return_remapped_features=True), steps=4)
    return {"losses": module.losses}


def test_tables_on_the_meta_device() -> None:
    losses = run_distributed(_on_meta, 2)[0]["losses"]
    assert len(set(losses)) == 4
    assert all(loss == loss for loss in losses)


def _hashed_states(path: str | None) -> dict[str, Any]:
    """Reading works on CPU, so that tables trained on a GPU can be looked up there."""
    torch.manual_seed(0)
    module = ManagedRecommender()
    module.net.items = _hashed(evicts=False)
    maps = module.net.items._managed_collision_collection._managed_collision_modules
    assert isinstance(maps, nn.ModuleDict)
    if path is None:
        maps["item"].load_state_dict({"_hash_zch_identities": torch.arange(32).view(-1, 1) * 100}, strict=False)
    fit = trainer(devices=int(os.environ["WORLD_SIZE"]))
    fit.validate(module, ManagedBatches(0, 2), ckpt_path=path, verbose=False)
    local = module.net.items._managed_collision_collection._managed_collision_modules["item"].state_dict()
    state = fit._checkpoint_connector.dump_checkpoint(weights_only=True)
    return {"state": state, "local": local["_hash_zch_identities"].flatten().tolist(), "losses": module.losses}


def test_hashed_maps_are_cut_and_gathered(tmp_path: Path) -> None:
    two, whole = run_distributed(_hashed_states, 2, None), [100 * i for i in range(32)]
    assert [rank["local"] for rank in two] == [whole[:16], whole[16:]]
    assert two[0]["state"]["state_dict"][f"net.{MANAGED}.item._hash_zch_identities"].flatten().tolist() == whole
    module = ManagedRecommender()
    module.net.items = _hashed(evicts=False)
    module.load_state_dict(two[0]["state"]["state_dict"], strict=True)
    path = str(tmp_path / "hashed.ckpt")
    torch.save(two[0]["state"], path)
    four = run_distributed(_hashed_states, 4, path)
    assert [i for rank in four for i in rank["local"]] == whole
    assert four[0]["losses"] == pytest.approx(two[0]["losses"])


def test_hashed_maps_with_other_buckets_are_refused(tmp_path: Path) -> None:
    path, state = str(tmp_path / "hashed.ckpt"), run_distributed(_hashed_states, 2, None)[0]["state"]
    state["state_dict"][f"net.{MANAGED}.item._hash_zch_bucket"].fill_(8)
    torch.save(state, path)
    with pytest.raises(RankFailed, match=r"table 'item' .*the checkpoint has 8 buckets, total_num_buckets=4"):
        run_distributed(_hashed_states, 2, path)


def _together(alias: bool) -> tuple[list[float], set[str]]:
    torch.manual_seed(0)
    module = ManagedRecommender("adagrad")
    if alias:
        module.again = module.net.items
    fit = trainer(devices=2)
    fit.fit(module, ManagedBatches(int(os.environ["RANK"]), 5))
    state = fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]
    return module.losses, set(state)


def test_collection_held_twice() -> None:
    (once, names), (twice, more) = (run_distributed(_together, 2, alias)[0] for alias in (False, True))
    assert once == twice
    module = ManagedRecommender()
    module.again = module.net.items
    assert more == set(module.state_dict())
    assert names == set(ManagedRecommender().state_dict())


def test_data_may_have_more_ids_than_rows() -> None:
    collections = [collection for collection, _ in find_collections(ManagedRecommender())]
    assert [collection.managed for collection in collections] == [True, False]
    check_num_embeddings(collections, {"history": 10**6})
    with pytest.raises(ValueError, match="'cat'"):
        check_num_embeddings(collections, {"category": 10**6})


class Kinds(ManagedRecommender):
    """Keeps the types of what its collection returns."""

    def on_train_start(self) -> None:
        self.kinds: list[tuple[str, ...]] = []
        self.net.items.register_forward_hook(lambda _, args, found: self.kinds.append(tuple(type(f).__name__ for f in found)))


def _kinds() -> list[tuple[str, ...]]:
    module = Kinds()
    trainer(devices=2).fit(module, ManagedBatches(int(os.environ["RANK"]), 2))
    return module.kinds


def test_returns_what_the_unsharded_collection_returns() -> None:
    assert run_distributed(_kinds, 2)[0] == [("dict", "KeyedJaggedTensor")] * 2
