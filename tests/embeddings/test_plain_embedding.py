"""Plain embeddings that are sharded: which ones are chosen or refused, and the results of lookups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torchrec import EmbeddingCollection, EmbeddingConfig

from lightning_freescale.embeddings.collection_kinds import LARGE_EMBEDDING
from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.plain_embedding import (
    EmbeddingIds,
    as_collection,
    choose_embeddings,
    rows_of_ids,
)

ROWS = LARGE_EMBEDDING // 8


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


def _changed(act: Callable[[Any], Any], **options: Any) -> nn.Embedding:
    embedding = nn.Embedding(10, 8, **options)
    act(embedding)
    return embedding


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
        ((collection, _),) = find_collections(root, {root.emb})
        assert collection.attributes == (("scale",) if kind == "attributes" else ()), "carried to the sharded module"


TIED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "same": (lambda: nn.Embedding(10, 8, padding_idx=0), ""),
    "padding": (lambda: nn.Embedding(10, 8), "'emb' is also 'again.weight', but padding_idx is 0 and None"),
    "own forward": (lambda: OwnForward(10, 8, padding_idx=0), r"'again' is an OwnForward.*\['forward'\]"),
    "attributes": (
        lambda: _changed(lambda emb: setattr(emb, "scale", 2), padding_idx=0),
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
