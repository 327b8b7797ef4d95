"""Which nn.Embeddings are sharded, and which are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torchrec import EmbeddingCollection, EmbeddingConfig

from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.embedding_choice import LARGE_EMBEDDING, choose_embeddings

ROWS = LARGE_EMBEDDING // 8


class Module(nn.Module):
    """Large and small embeddings, TorchRec's own and something else."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"])
        self.collection = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.tower = nn.Module()
        self.tower.item_emb = nn.Embedding(ROWS, 8, padding_idx=0, device="meta")
        self.user_emb = nn.Embedding(ROWS - 1, 8, device="meta")
        self.bag = nn.EmbeddingBag(ROWS, 8, device="meta")
        self.head = nn.Linear(8, 8)


class OwnInit(nn.Embedding):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = 2.0

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)


class OwnForward(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(ids)


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
    assert choose_embeddings(root, "auto").chosen.keys() == {"tower.item_emb"}
    assert choose_embeddings(root, None).left.keys() == {"tower.item_emb"} and not choose_embeddings(root, None).chosen
    root.tower.item_emb.max_norm = 1.0
    choice = choose_embeddings(root, "auto")
    assert choice.chosen == {} and "max_norm=1.0" in choice.unshardable["tower.item_emb"]
    assert choose_embeddings(root, None).left == {}


def _tied(root: Any) -> None:
    root.head = nn.Linear(8, 10, bias=False)
    root.emb.weight = root.head.weight


def _hooked(root: Any) -> None:
    root.emb.register_forward_hook(lambda *args: None)


def _parametrized(root: Any) -> None:
    parametrize.register_parametrization(root.emb, "weight", nn.Tanh())


def _with_own_method(root: Any) -> None:
    root.emb.forward = lambda ids: ids


MAKE: dict[str, tuple[Callable[[], nn.Embedding], Callable[[Any], None] | None, str]] = {
    "max_norm": (lambda: nn.Embedding(10, 8, max_norm=2.0), None, "'emb' has max_norm=2.0"),
    "by frequency": (lambda: nn.Embedding(10, 8, scale_grad_by_freq=True), None, "scale_grad_by_freq=True"),
    "own forward": (lambda: OwnForward(10, 8), None, r"is a OwnForward, which has \['forward'\] of its own"),
    "patched": (lambda: nn.Embedding(10, 8), _with_own_method, r"\['forward'\] of its own"),
    "own init, on meta": (lambda: OwnInit(10, 8, device="meta"), None, "on the meta device with its own reset_parameters"),
    "width": (lambda: nn.Embedding(10, 6), None, "embedding_dim=6, but FBGEMM's tables need a multiple of 4"),
    "type": (lambda: nn.Embedding(10, 8, dtype=torch.float64), None, "is of torch.float64"),
    "tied": (lambda: nn.Embedding(10, 8), _tied, "the weight of 'emb' is also 'head.weight'"),
    "hooks": (lambda: nn.Embedding(10, 8), _hooked, "'emb' has hooks"),
    "parametrized": (lambda: nn.Embedding(10, 8), _parametrized, "is a ParametrizedEmbedding"),
}


@pytest.mark.parametrize("what", MAKE)
def test_what_would_not_be_the_same_is_refused(what: str) -> None:
    make, change, told = MAKE[what]
    root: Any = nn.Module()
    root.emb = make()
    if change is not None:
        change(root)
    with pytest.raises(ValueError, match=rf"shard=\['emb'\]\): .*{told}.*, or leave 'emb' out"):
        choose_embeddings(root, ["emb"])


@pytest.mark.parametrize("make", [lambda: OwnInit(10, 8), lambda: nn.Embedding(10, 8, sparse=True)])
def test_what_is_the_same_is_not(make: Callable[[], nn.Embedding]) -> None:
    root: Any = nn.Module()
    root.emb = make()
    assert choose_embeddings(root, ["emb"]).chosen == {"emb": root.emb}


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("tower.item_embs", "the module has no 'tower.item_embs', did you mean 'tower.item_emb'?"),
        ("zzz", r"the module has no 'zzz', its nn.Embedding modules are \['tower.item_emb', 'user_emb'\]"),
        ("head", "'head' is a Linear, no nn.Embedding"),
        ("bag", "'bag' is a EmbeddingBag, no nn.Embedding"),
        ("collection", "'collection' is a EmbeddingCollection, no nn.Embedding"),
        ("collection.embeddings.t", "belongs to a module of TorchRec"),
    ],
)
def test_paths_without_an_embedding_are_refused(path: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        choose_embeddings(Module(), [path])
