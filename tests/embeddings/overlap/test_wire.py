"""Tables of 16 bits travel as they are, with the results of plain TorchRec; ``wire`` rounds rows and gradients of others."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine, id_exchange
from lightning_freescale.embeddings.overlap.row_codec import RowCodec
from lightning_freescale.embeddings.shards import ShardedTables
from lightning_freescale.testing import run_distributed
from tests.helpers.hot_rows import HOT, every_row_hot
from tests.helpers.sequences import (
    DIM,
    OPTIMIZERS,
    Run,
    Sequences,
    batches,
    differences,
    ids_by_turns,
    sharded,
    train_overlapped,
    train_plain,
)

FP32, FP16, BF16 = DataType.FP32, DataType.FP16, DataType.BF16
STEPS = 8
TABLES = ("items.embeddings.item", "items.embeddings.category", "tags.embeddings.tag")
DTYPES = {FP16: torch.float16, BF16: torch.bfloat16}
HOW = {**OPTIMIZERS, "adam": TableOptimizer(torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}, group=0, sparse_adam=True)}


def _rounded(types: tuple[DataType, ...], by_hand: set[DataType], dim: int) -> nn.Module:
    """Return the model with tables of float32 in place of those of the types ``by_hand``."""
    model = Sequences([FP32 if kind in by_hand else kind for kind in types], dim)
    for name, kind in zip(TABLES, types):
        if kind in by_hand:
            weight = model.get_parameter(f"{name}.weight").data
            weight.copy_(weight.half().to(DTYPES[kind]))  # an unsharded collection holds weights of BF16 as float16
    return model


def _round_between(
    types: tuple[DataType, ...], by_hand: set[DataType], step: int, tables: ShardedTables, engine: OverlapEngine | None
) -> None:
    kinds = {name.rpartition(".")[2]: kind for name, kind in zip(TABLES, types)}
    with nullcontext() if engine is None else engine.writing():
        for shard in tables.shards():
            if kinds[shard.table.name] in by_hand:
                shard.weight.copy_(shard.weight.to(DTYPES[kinds[shard.table.name]]))


def _as_plain(optimizer: str, types: tuple[DataType, ...], dim: int, ways: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Return the differences from plain TorchRec for each way.

    On the CPU, TorchRec supports neither bfloat16 nor Adam. Tables of float32 are rounded after each step instead.
    """
    data, how = batches(dist.get_rank(), STEPS), HOW[optimizer]
    by_hand = {FP16, BF16} if how.sparse_adam else {BF16}
    train = train_plain if dim % 4 == 0 and not how.sparse_adam else train_overlapped  # TorchRec refuses odd widths, too
    make, between = partial(_rounded, types, by_hand, dim), partial(_round_between, types, by_hand)
    plain = train(how, data, make=make, between=between)
    assert len(set(plain.losses)) > STEPS / 2, "the loss must move, or equality means nothing"
    found = {}
    for name, options in ways.items():
        id_exchange.heads_travel_apart = lambda device, name=name: name == "heads apart"  # as on a GPU
        mine = train_overlapped(how, data, make=partial(Sequences, types, dim), **options)
        dtypes = {mine.tables[name.rpartition(".")[2]].dtype for name in TABLES}
        assert dtypes == {DTYPES[kind] for kind in types}
        mine.tables = {name: value.to(plain.tables[name].dtype) for name, value in mine.tables.items()}
        found[name] = differences(mine, plain)
    return found


WAYS: dict[str, dict[str, Any]] = {"known": {}, "late, wrong or unknown": {"submit": ids_by_turns}, "heads apart": {}}


@pytest.mark.parametrize(
    ("optimizer", "types", "dim"),
    [
        ("sgd", (FP16, FP16, FP16), DIM),
        ("rowwise_adagrad", (FP16, BF16, BF16), DIM),  # types of one width do not share messages
        ("adagrad", (BF16, BF16, BF16), 5),
        ("adam", (FP16, BF16, FP16), 5),
    ],
)
def test_tables_of_16_bits_as_in_plain_torchrec(optimizer: str, types: tuple[DataType, ...], dim: int) -> None:
    for found in run_distributed(_as_plain, 2, optimizer, types, dim, WAYS):
        assert found == {way: [] for way in WAYS}


def _bytes_sent(dim: int) -> dict[str, dict[str, float]]:
    data, how, found = batches(dist.get_rank(), STEPS), OPTIMIZERS["sgd"], {}
    wires: dict[str, Any] = {
        "float32": "float32",
        "bfloat16": "bfloat16",
        "rows": {"rows": "float16"},
        "gradients": {"rows": "float32", "gradients": "bfloat16"},
    }
    for name, wire in wires.items():
        found[name] = train_overlapped(how, data, make=partial(Sequences, dim=dim), dedup=True, wire=wire).statistics
    tables = train_overlapped(how, data, make=partial(Sequences, (FP16, FP16, FP16), dim), dedup=True)
    return found | {"tables": tables.statistics}


@pytest.mark.parametrize("dim", [8, 5])
def test_bytes_of_rows_and_gradients(dim: int) -> None:
    totals: dict[str, dict[str, float]] = {}
    for found in run_distributed(_bytes_sent, 2, dim):
        for name, counts in found.items():
            of_name = totals.setdefault(name, dict.fromkeys(("ids", "values"), 0.0))
            of_name["ids"] += counts["ids_bytes"]
            of_name["values"] += counts["colliding_bytes"] + counts["non_colliding_bytes"]
    assert len({of_name["ids"] for of_name in totals.values()}) == 1
    whole, words = totals["float32"]["values"], -(-dim // 2)
    assert whole > 10_000
    assert totals["bfloat16"]["values"] * dim == whole * words
    saved = {name: whole - of_name["values"] for name, of_name in totals.items()}
    assert saved["rows"] + saved["gradients"] == saved["bfloat16"] and min(saved["rows"], saved["gradients"]) > 0.1 * whole
    assert saved["tables"] == saved["rows"], "the rows of 16-bit tables, and gradients of float32"


def _on_both_routes(wire: Any, types: tuple[DataType, ...]) -> list[Run]:
    data = batches(dist.get_rank() // 2, 4, samples=64)  # the ranks of a node need the same rows
    train = partial(train_overlapped, OPTIMIZERS["sgd"], data, make=partial(Sequences, types, dim=5), wire=wire)
    options = {**HOT, "rerank_every_n_steps": 8_000}  # no list is published
    with every_row_hot():
        return [train(**options), train(**{**options, "hot_rows": 0})]


@pytest.mark.parametrize(("wire", "types"), [("bfloat16", (FP32, FP32, FP32)), ("float32", (BF16, FP16, BF16))])
def test_proxies_forward_rows_and_sum_gradients(wire: Any, types: tuple[DataType, ...]) -> None:
    crossed = torch.zeros(2)
    for hot, cold in run_distributed(_on_both_routes, 4, wire, types):
        assert hot.losses == pytest.approx(cold.losses, rel=2**-8) and hot.losses[0] == cold.losses[0]
        for name, value in cold.tables.items():
            assert (hot.tables[name].float() - value.float()).norm() < 2**-8 * value.float().norm(), name
        crossed += torch.tensor([run.statistics["cross_node_bytes"] for run in (hot, cold)])
    assert crossed[0] < 0.9 * crossed[1], "rows cross once per node"


class Linear(nn.Module):
    """A loss whose gradients are given, so that they can be rounded by hand."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        tables = [EmbeddingConfig(name="item", num_embeddings=rows, embedding_dim=dim, feature_names=["item"])]
        self.items = EmbeddingCollection(tables=tables)
        draw = torch.Generator().manual_seed(0)
        self.items.embeddings["item"].weight.data.copy_(torch.randn(rows, dim, generator=draw))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: KeyedJaggedTensor, gradients: Tensor) -> Tensor:
        return (self.items(ids)["item"].values() * gradients).sum() * self.scale


def _gradients(rows: int, dim: int, rank: int) -> Tensor:
    drawn = torch.randn(rows, dim, generator=torch.Generator().manual_seed(1 + rank))
    drawn[0, 0], drawn[0, 1] = 1e6, -1e-9  # beyond the largest float16, and below its smallest
    return drawn


def _one_update(wire: Any, rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return all rows as evaluated before the update, and the table after it."""
    rank = dist.get_rank()
    ids = KeyedJaggedTensor(["item"], torch.arange(rows), lengths=torch.tensor([rows]))
    with sharded(OPTIMIZERS["sgd"], partial(Linear, rows, dim), overlap=True) as (model, ddp, tables, _):
        engine = OverlapEngine(tables, wire=wire)
        with torch.no_grad():
            before = model.items(ids)["item"].values()
        engine.begin_step()
        ddp(ids, _gradients(rows, dim, rank)).backward()
        engine.end_backward()
        engine.drain()
        whole = tables.full_weight("items.embeddings.item")
        engine.close()
    return before, whole


@pytest.mark.parametrize(
    ("wire", "of_rows", "of_gradients"),
    [
        ("float16", torch.float16, torch.float16),
        ({"gradients": "bfloat16"}, torch.float32, torch.bfloat16),
        ({"rows": "bfloat16", "gradients": "float32"}, torch.bfloat16, torch.float32),
    ],
)
def test_values_are_rounded_once(wire: Any, of_rows: torch.dtype, of_gradients: torch.dtype) -> None:
    rows, dim = 7, 5
    start: Any = Linear(rows, dim).items.embeddings["item"].weight.detach()
    expected = start.clone()
    for rank in range(2):
        limits = torch.finfo(of_gradients)
        given = (_gradients(rows, dim, rank) / 2).clamp(limits.min, limits.max)  # the mean over the ranks
        expected -= 0.5 * given.to(of_gradients).float()
    assert not torch.equal(start.to(of_rows).float(), start) or of_rows == torch.float32
    for before, whole in run_distributed(_one_update, 2, wire, rows, dim):
        assert torch.equal(before, start.to(of_rows).float())
        assert torch.allclose(whole, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 4, 7])
def test_codec_keeps_values_of_its_type(dtype: torch.dtype, dim: int) -> None:
    codec, values = RowCodec(dim, dtype), torch.randn(6, dim).to(dtype)
    values[0, 0], values[1, 0] = torch.finfo(dtype).tiny / 2, -0.0
    words = codec.encode(values)
    assert words.shape == (6, codec.words) and words.dtype == torch.float32 and codec.words == -(-dim * dtype.itemsize // 4)
    assert torch.equal(codec.decode(words).to(dtype).view(torch.uint8), values.view(torch.uint8))
    assert codec.decode(codec.encode(values[:0])).shape == (0, dim)


def test_values_that_16_bits_cannot_represent() -> None:
    given = torch.tensor([[1e6, -1e6, float("inf"), float("nan"), 1e-9]])
    found = RowCodec(5, torch.float16).decode(RowCodec(5, torch.float16).encode(given))
    assert torch.equal(found[0, [0, 1, 2, 4]], torch.tensor([65504.0, -65504.0, 65504.0, 0.0])) and found[0, 3].isnan()


def _refused(wires: list[Any]) -> None:
    with sharded(OPTIMIZERS["sgd"]) as (_, _, tables, _):
        for wire in wires:
            with pytest.raises(ValueError, match=r"wire=.*Pass one of 'float32', 'bfloat16', 'float16'"):
                OverlapEngine(tables, wire=wire)


def test_unknown_types_are_refused() -> None:
    run_distributed(
        _refused, 1, ["float64", {"rows": "int8"}, {"row": "bfloat16"}, torch.bfloat16, None, {"rows": ["float16"]}]
    )


def _several(types: tuple[DataType, ...]) -> list[str]:
    with sharded(OPTIMIZERS["sgd"], partial(Sequences, types), overlap=True) as (_, _, tables, _):
        engine = OverlapEngine(tables)
        paths = list(engine.collections)
        engine.close()
    return paths


def test_names_of_the_parts_of_a_collection() -> None:
    assert run_distributed(_several, 1, (FP16, BF16, FP16))[0] == ["items (dim 8, FP16)", "items (dim 8, BF16)", "tags"]
