"""Managed collisions: checks, and other features in combination with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule

from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.id_checks import check_num_embeddings
from lightning_freescale.testing import run_distributed
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
    """A subclass of a collection with managed collisions."""


class OwnManager(MCHManagedCollisionModule):
    """An unknown kind of map."""


class OwnTables(EmbeddingCollection):
    """An unknown kind of collection."""


def _manager(kind: Any = MCHManagedCollisionModule, rows: int = 32) -> Any:
    return kind(rows, CPU, eviction_policy=LFU_EvictionPolicy(), eviction_interval=2)


def _bag() -> nn.Module:
    configs = [EmbeddingBagConfig(name="item", num_embeddings=32, embedding_dim=DIM, feature_names=["history"])]
    maps = ManagedCollisionCollection({"item": _manager()}, configs)
    return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables=configs), maps)


def _hashed(evicts: bool) -> nn.Module:
    configs = managed_tables()
    eviction: dict[str, Any] = {
        "eviction_policy_name": HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
        "eviction_config": HashZchEvictionConfig(features=["history", "candidate", "user"], single_ttl=1),
    }
    rows = {config.name: config.num_embeddings for config in configs}
    maps: dict[str, Any] = {
        name: HashZchManagedCollisionModule(count, CPU, total_num_buckets=4, **(eviction if evicts else {}))
        for name, count in rows.items()
    }
    tables = EmbeddingCollection(tables=configs)
    return ManagedCollisionEmbeddingCollection(tables, ManagedCollisionCollection(maps, configs), return_remapped_features=True)


def test_what_cannot_be_sharded_is_refused() -> None:
    whole = managed_collection()
    inner, maps = whole._embedding_module, whole._managed_collision_collection
    configs = inner.embedding_configs()
    own_tables = OwnTables(tables=configs)
    own_map = {"item": _manager(OwnManager), "user": _manager(rows=20)}
    shared = [
        EmbeddingConfig(name=name, num_embeddings=32, embedding_dim=DIM, feature_names=["history"]) for name in ("item", "user")
    ]
    refused: list[tuple[nn.Module, str]] = [
        (Own(inner, maps), r"\(Own\)"),
        (ManagedCollisionEmbeddingCollection(own_tables, maps), "OwnTables"),
        (
            ManagedCollisionEmbeddingCollection(inner, ManagedCollisionCollection(own_map, configs)),
            "'item' is an OwnManager",
        ),
        (_bag(), "ManagedCollisionEmbeddingBagCollection"),
        (maps, "ManagedCollisionCollection"),
        (_manager(), "MCHManagedCollisionModule"),
        (managed_collection(shared), "'history'.*'item'.*'user'"),
    ]
    root = ManagedRecommender()
    for module, message in refused:
        root.net.items = module
        with pytest.raises(ValueError, match=f"'net.items'.*{message}"):
            find_collections(root)


def _fit(items: nn.Module, steps: int) -> ManagedRecommender:
    module = ManagedRecommender()
    module.net.items = items
    trainer(devices=int(os.environ["WORLD_SIZE"])).fit(module, ManagedBatches(int(os.environ["RANK"]), steps))
    return module


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
    assert [name for name, value in before.items() if not torch.equal(after[name], value)] == []


def _others() -> tuple[list[float], list[list[float]], list[set[str]]]:
    """Return losses with tables on the meta device, and losses and names of a collection that is held once and twice."""
    with torch.device("meta"):
        tables = EmbeddingCollection(tables=managed_tables(), device=torch.device("meta"))
    maps = managed_collection(tables.embedding_configs())._managed_collision_collection
    on_meta = _fit(ManagedCollisionEmbeddingCollection(tables, maps, return_remapped_features=True), steps=4).losses
    losses, names = [], []
    for alias in (False, True):
        torch.manual_seed(0)
        module = ManagedRecommender("adagrad")
        if alias:
            module.again = module.net.items
        fit = trainer(devices=2)
        fit.fit(module, ManagedBatches(int(os.environ["RANK"]), 5))
        losses.append(module.losses)
        names.append(set(fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]))
    with pytest.raises(ValueError, match=r"'item'.*'net.items'.*HashZchManagedCollisionModule"):
        _fit(_hashed(evicts=True), 1)
    return on_meta, losses, names


def test_tables_on_the_meta_device_and_a_collection_held_twice() -> None:
    on_meta, (once, twice), (names, more) = run_distributed(_others, 2)[0]
    assert len(set(on_meta)) == 4
    assert all(loss == loss for loss in on_meta)
    assert once == twice
    module = ManagedRecommender()
    assert names == set(module.state_dict())
    module.again = module.net.items
    assert more == set(module.state_dict())


def _hashed_states(path: str | None) -> dict[str, Any]:
    """Return states on the CPU, where tables that were trained on a GPU can be read."""
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


def _refuses_buckets(path: str) -> None:
    with pytest.raises(ValueError, match=r"'item'.*8 buckets.*total_num_buckets=4"):
        _hashed_states(path)


def test_hashed_maps_are_cut_and_gathered(tmp_path: Path) -> None:
    two, whole = run_distributed(_hashed_states, 2, None), [100 * i for i in range(32)]
    assert [rank["local"] for rank in two] == [whole[:16], whole[16:]]
    state, path = two[0]["state"], str(tmp_path / "hashed.ckpt")
    assert state["state_dict"][f"net.{MANAGED}.item._hash_zch_identities"].flatten().tolist() == whole
    module = ManagedRecommender()
    module.net.items = _hashed(evicts=False)
    module.load_state_dict(state["state_dict"], strict=True)
    torch.save(state, path)
    four = run_distributed(_hashed_states, 4, path)
    assert [i for rank in four for i in rank["local"]] == whole
    assert four[0]["losses"] == pytest.approx(two[0]["losses"])
    state["state_dict"][f"net.{MANAGED}.item._hash_zch_bucket"].fill_(8)
    torch.save(state, path)
    run_distributed(_refuses_buckets, 2, path)


def test_data_may_have_more_ids_than_rows() -> None:
    collections = [collection for collection, _ in find_collections(ManagedRecommender())]
    assert [collection.managed for collection in collections] == [True, False]
    check_num_embeddings(collections, {"history": 10**6})
    with pytest.raises(ValueError, match="'cat'"):
        check_num_embeddings(collections, {"category": 10**6})
