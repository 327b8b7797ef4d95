"""The search for collections and nn.Embedding modules, the checks of modules, and the results of lookups."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection

from lightning_freescale.embeddings.collection_kinds import LARGE_EMBEDDING, check_replicas
from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.plain_embedding import (
    EmbeddingIds,
    as_collection,
    choose_embeddings,
    rows_of_ids,
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


class Module(nn.Module):
    """A module with large and small embeddings, TorchRec's collections and other layers."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"])
        self.collection = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.tower = nn.Module()
        self.tower.item_emb = nn.Embedding(ROWS, 8, padding_idx=0, device="meta")
        self.user_emb = nn.Embedding(ROWS - 1, 8, device="meta")
        self.bag = nn.EmbeddingBag(ROWS, 8, device="meta")
        self.head = nn.Linear(8, 8)


def test_only_those_named_are_collections() -> None:
    root = Module()
    root.again = root.tower.item_emb
    choice = choose_embeddings(root, ["again", "user_emb"])
    assert choice.chosen == {"tower.item_emb": root.tower.item_emb, "user_emb": root.user_emb}
    found = {collection.path: collection for collection, _ in find_collections(root, set(choice.chosen.values()))}
    assert found.keys() == {"collection", "tower.item_emb", "user_emb"}
    item = found["tower.item_emb"]
    (table,) = item.tables
    assert item.embedding and item.names("weight") == ("tower.item_emb.weight", "again.weight")
    assert (table.key, table.rows, table.dim, table.padding_row) == ("tower.item_emb.weight", ROWS, 8, 0)
    assert {collection.path for collection, _ in find_collections(root)} == {"collection"}


def test_auto_takes_the_large_ones_that_can_be_sharded() -> None:
    root = Module()
    assert choose_embeddings(root, "auto").chosen.keys() == {"tower.item_emb", "bag"}
    assert choose_embeddings(root, None).left.keys() == {"tower.item_emb", "bag"} and not choose_embeddings(root, None).chosen
    root.tower.item_emb.max_norm = 1.0
    root.bag.padding_idx = 3
    choice = choose_embeddings(root, "auto")
    assert (
        choice.chosen == {}
        and "padding_idx=3" in choice.unshardable["bag"]
        and "max_norm=1.0" in choice.unshardable["tower.item_emb"]
    )
    assert choose_embeddings(root, None).left == {}


class OwnInit(nn.Embedding):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)


class OwnForward(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


class OwnMembers(nn.Embedding):
    SCALE = 2.0

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__(rows, dim)
        self.bias = nn.Parameter(torch.ones(dim))
        self.register_buffer("seen", torch.zeros(rows))


def _changed(act: Callable[[Any], Any]) -> nn.Embedding:
    return _after(nn.Embedding(10, 8), act)


MADE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "max_norm": (lambda: nn.Embedding(10, 8, max_norm=2.0), "max_norm=2.0"),
    "by frequency": (lambda: nn.Embedding(10, 8, scale_grad_by_freq=True), "scale_grad_by_freq=True"),
    "own forward": (lambda: OwnForward(10, 8), r"OwnForward.*\['forward'\]"),
    "own members": (lambda: OwnMembers(10, 8), r"OwnMembers.*\['SCALE', 'bias', 'seen'\]"),
    "attributes": (lambda: _changed(lambda emb: setattr(emb, "scale", 2.0)), ""),
    "patched": (lambda: _changed(lambda emb: setattr(emb, "forward", lambda ids: ids)), r"\['forward'\]"),
    "own init, on meta": (lambda: OwnInit(10, 8, device="meta"), "meta.*reset_parameters"),
    "type": (lambda: nn.Embedding(10, 8, dtype=torch.float64), "torch.float64"),
    "hooks": (lambda: _changed(lambda emb: emb.register_forward_hook(lambda *args: None)), "hooks"),
    "parametrized": (
        lambda: _changed(lambda emb: parametrize.register_parametrization(emb, "weight", nn.Tanh())),
        "ParametrizedEmbedding",
    ),
    "tied": (lambda: nn.Embedding(10, 8), ""),
    "tied, on meta": (lambda: nn.Embedding(10, 8, device="meta"), "meta device"),
    "held otherwise": (lambda: nn.Embedding(10, 8), "'rows', and only a module that has it as its 'weight'"),
    "own init": (lambda: OwnInit(10, 8), ""),
    "sparse": (lambda: nn.Embedding(10, 8, sparse=True), ""),
    "width": (lambda: nn.Embedding(10, 6), ""),
    "bag": (lambda: nn.EmbeddingBag(10, 6, sparse=True), ""),
    "bag with padding": (lambda: nn.EmbeddingBag(10, 8, padding_idx=3), "padding_idx=3"),
    "bag by frequency": (lambda: nn.EmbeddingBag(10, 8, scale_grad_by_freq=True), "scale_grad_by_freq=True"),
    "bag with a norm": (lambda: nn.EmbeddingBag(10, 8, max_norm=1.0), "max_norm=1.0"),
}


@pytest.mark.parametrize("kind", MADE)
def test_embeddings_that_would_not_be_the_same_are_refused(kind: str) -> None:
    make, reason = MADE[kind]
    root: Any = nn.Module()
    root.emb = make()
    if kind.startswith("tied"):
        root.head = nn.Linear(8, 10, bias=False, device=root.emb.weight.device)
        root.emb.weight = root.head.weight
    if kind == "held otherwise":
        root.rows = root.emb.weight
    if reason:
        with pytest.raises(ValueError, match=rf"shard=\['emb'\].*'emb'.*{reason}.*'emb'"):
            choose_embeddings(root, ["emb"])
    else:
        assert choose_embeddings(root, ["emb"]).chosen == {"emb": root.emb}


TIED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "same": (lambda: nn.Embedding(10, 8, padding_idx=0), ""),
    "padding": (lambda: nn.Embedding(10, 8), "'emb' is also 'again.weight', but padding_idx is 0 and None"),
    "own forward": (lambda: OwnForward(10, 8, padding_idx=0), r"'again' is an OwnForward.*\['forward'\]"),
    "attributes": (
        lambda: _after(nn.Embedding(10, 8, padding_idx=0), lambda emb: setattr(emb, "scale", 2)),
        r"'again'.*\['scale'\]",
    ),
    "a bag": (lambda: nn.EmbeddingBag(10, 8), "'again.weight', but class is Embedding and EmbeddingBag. Use one class"),
    "on meta": (lambda: nn.Embedding(10, 8, padding_idx=0, device="meta"), r"\['emb', 'again'\].*meta"),
}


@pytest.mark.parametrize("kind", TIED)
def test_two_embeddings_of_one_weight_are_one_table(kind: str) -> None:
    make, reason = TIED[kind]
    root: Any = nn.Module()
    root.emb, root.again = nn.Embedding(10, 8, padding_idx=0), make()
    if kind == "on meta":
        root.emb.weight = root.again.weight
    root.again.weight = root.emb.weight
    if reason:
        with pytest.raises(ValueError, match=reason):
            choose_embeddings(root, ["emb"])
    else:
        for path in ("emb", "again"):
            assert choose_embeddings(root, [path]).chosen == {"emb": root.emb}
        ((collection, module),) = find_collections(root, {root.emb})
        assert (collection.path, collection.aliases, module) == ("emb", ("again",), root.emb)
        root.head = nn.Linear(8, 10, bias=False)
        root.head.weight = root.emb.weight
        ((collection, _),) = find_collections(root, {root.emb})
        assert (collection.aliases, collection.ties) == (("again",), ("head",))
        assert collection.names("weight") == ("emb.weight", "again.weight", "head.weight")
        root.rows = root.emb.weight
        with pytest.raises(ValueError, match="'rows', and only"):
            choose_embeddings(root, ["again"])


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("tower.item_embs", r"'tower.item_embs'.*'tower.item_emb'\?"),
        ("zzz", r"'zzz'.*\['tower.item_emb', 'user_emb', 'bag'\]"),
        ("head", "'head' is a Linear"),
        ("collection", "'collection' is an EmbeddingCollection"),
        ("collection.embeddings.t", "'collection.embeddings.t' belongs to a module of TorchRec"),
    ],
)
def test_paths_without_an_embedding_are_refused(path: str, parts: str) -> None:
    with pytest.raises(ValueError, match=parts):
        choose_embeddings(Module(), [path])


WEIGHT = torch.arange(20.0).view(5, 4)


def _look_up(ids: Tensor, weight: Tensor, padding_idx: int | None, whole: bool = False) -> Tensor:
    features = EmbeddingIds("emb", ids)
    values = weight[features.values().clone()]
    return rows_of_ids(values if whole else values[: len(values)], ids, weight.shape[1], padding_idx)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 2)])
def test_ids_of_any_shape_are_one_sample(shape: tuple[int, ...]) -> None:
    ids = torch.ones(shape, dtype=torch.int32)
    features = EmbeddingIds("emb", ids)
    assert features.keys() == ["emb"] and features.stride() == 1
    assert features.lengths().tolist() == features.length_per_key() == [ids.numel()]
    assert features.offset_per_key() == [0, ids.numel()] and features.offsets().tolist() == [0, ids.numel()]
    assert features.ids is ids and features.values().shape == (ids.numel(),)
    assert torch.equal(_look_up(ids, WEIGHT, None), WEIGHT[ids.long()])


@pytest.mark.parametrize("whole", [False, True])
def test_the_result_may_be_changed_and_the_padding_row_has_no_gradient(whole: bool) -> None:
    ids, weight = torch.tensor([[1, 2], [1, 4]]), WEIGHT.clone().requires_grad_()
    found = _look_up(ids, weight, 1, whole)
    found *= 2
    found[0, 0] = float("inf") * found[0, 0]
    ids.zero_()
    found.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0.0] * 4, [0.0] * 4, [2.0] * 4, [0.0] * 4, [2.0] * 4]
    trained = torch.ones(4, requires_grad=True)
    with torch.no_grad():  # not a view, so trained values may be added in place
        found = _look_up(torch.tensor([[1, 2]]), weight, 1, whole)
        assert torch.equal(found[0], WEIGHT[[1, 2]])
    found += trained
    found.sum().backward()
    assert trained.grad is not None and trained.grad.tolist() == [2.0] * 4
    _look_up(torch.tensor([[1, 2]]), weight, 1, whole).detach_()


@pytest.mark.parametrize("path", ["items", "keys", "type", "training", "net.items"])
def test_an_embedding_may_have_any_name(path: str) -> None:
    collection = as_collection(path, 5, 4)
    assert collection.embedding_configs()[0].feature_names == [path]


def test_a_change_of_the_result_does_not_reach_what_torchrec_has_returned() -> None:
    ids = torch.tensor([1, 2])
    whole = WEIGHT[ids]
    rows_of_ids(whole[:2], ids, whole.shape[1], None).zero_()
    assert torch.equal(whole, WEIGHT[ids])
