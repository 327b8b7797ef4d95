"""Lookups outside of steps return the same values as in training, for any lookups and any number of them per rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine, local_rows
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.bags import MEAN, SETTINGS, SUM, configs
from tests.helpers.hot_rows import HOT

ROWS = 30
FEATURES = {"rows": ["a", "b", "c"], "bags": ["d", "e", "f"], "weighted": ["g", "h"]}
MODULES = list(FEATURES)
SGD = TableOptimizer(torch.optim.SGD, {"lr": 0.1})


def _modules() -> nn.ModuleDict:
    torch.manual_seed(0)
    sequences = [
        EmbeddingConfig(name="x", num_embeddings=ROWS, embedding_dim=8, feature_names=["a", "b"]),
        EmbeddingConfig(name="y", num_embeddings=ROWS, embedding_dim=8, feature_names=["b", "c"]),
    ]
    # "e" is looked up by a sum and by a mean; widths of 6 are padded
    bags = {"t": (ROWS, 8, ["d", "e"], SUM), "u": (ROWS, 8, ["e"], MEAN), "v": (ROWS, 6, ["f"], MEAN)}
    weighted = {"w": (ROWS, 8, ["g"], SUM), "z": (ROWS, 6, ["h"], SUM)}
    made = {
        "rows": EmbeddingCollection(tables=sequences, need_indices=True),
        "bags": EmbeddingBagCollection(tables=configs(bags)),
        "weighted": EmbeddingBagCollection(tables=configs(weighted), is_weighted=True),
    }
    return nn.ModuleDict(made)


def _mixed_plan(modules: nn.ModuleDict) -> ShardingPlan:
    """Shard the tables in all ways on four ranks, two on each of two hosts; one rank owns two parts of "t"."""
    kinds = {
        "rows": {"x": column_wise([0, 3]), "y": row_wise()},
        "bags": {"t": column_wise([1, 1]), "u": table_row_wise(host_index=1), "v": table_wise(rank=2)},
        "weighted": {"w": grid_shard(host_indexes=[1]), "z": row_wise()},
    }
    sizes: Any = {"local_size": 2, "world_size": 4, "device_type": "cpu"}
    plans = {name: construct_module_sharding_plan(modules[name], of, **sizes) for name, of in kinds.items()}
    for plan in plans.values():
        for table in plan.values():
            table.compute_kernel = "fused"
    return ShardingPlan(plans)


@contextmanager
def _engine(
    planned: bool = False, optimizer: TableOptimizer = SGD, cached: bool = False, **options: Any
) -> Iterator[tuple[nn.ModuleDict, nn.ModuleDict, OverlapEngine]]:
    """Return the unsharded modules, the sharded ones, and their engine."""
    modules = _modules()
    whole = copy.deepcopy(modules)
    sharding = TableSharding(modules, torch.device("cpu"), overlap=True)
    optimizers = dict.fromkeys(sharding.parameters, optimizer)
    plan = _mixed_plan(whole) if planned else None
    ranks = dist.get_world_size()
    tables = sharding.shard(group=dist.new_group(), local_world_size=2 if planned else ranks, plan=plan, optimizers=optimizers)
    if cached:  # read rows as from tables with a cache, which only a GPU has
        local_rows.EmbeddingLocation = SimpleNamespace(MANAGED_CACHING=EmbeddingLocation.HOST)
    engine = OverlapEngine(tables, **options)
    yield whole, modules, engine
    engine.close()


def _random_lookup(draw: np.random.Generator, name: str) -> KeyedJaggedTensor:
    keys = list(draw.permutation([*FEATURES[name], "unused"]))
    samples = int(draw.integers(1, 5))
    variable = name != "rows" and draw.random() < 0.3
    strides = draw.integers(1, samples + 1, len(keys)) if variable else np.full(len(keys), samples)
    longest = draw.choice([1, 2, 9]) if draw.random() < 0.8 else 1
    lengths = torch.from_numpy(draw.integers(0, longest, int(strides.sum()))).to(draw.choice([torch.int32, torch.int64]))
    ids = torch.from_numpy(draw.integers(0, ROWS, int(lengths.sum()))).to(draw.choice([torch.int32, torch.int64]))
    # weights for an unweighted collection are ignored
    weights = torch.from_numpy(draw.random(len(ids))).float() if name == "weighted" or draw.random() < 0.3 else None
    inverse = None
    if variable or draw.random() < 0.2:  # a collection of sequences ignores weights
        inverse = keys, torch.stack([torch.from_numpy(draw.integers(0, stride, samples)) for stride in strides])
    if variable:
        return KeyedJaggedTensor(
            keys, ids, weights, lengths, stride_per_key_per_rank=[[int(s)] for s in strides], inverse_indices=inverse
        )
    if draw.random() < 0.3:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return KeyedJaggedTensor(keys, ids, weights, offsets=offsets, inverse_indices=inverse)
    return KeyedJaggedTensor(keys, ids, weights, lengths, inverse_indices=inverse)


def _parts(found: Any) -> dict[str, Tensor]:
    """Return all numbers in the output of a collection, by name."""
    if not isinstance(found, dict):
        return found.to_dict()
    parts = {}
    for key, jagged in found.items():
        parts |= {f"{key} values": jagged.values(), f"{key} lengths": jagged.lengths(), f"{key} ids": jagged.weights()}
    return parts


def _differing(found: Any, expected: Any) -> list[str]:
    ours, theirs = _parts(found), _parts(expected)
    assert list(ours) == list(theirs)
    return [name for name, value in theirs.items() if not torch.equal(ours[name], value)]


def _looked_up(seed: int, lookups: int, options: dict[str, Any]) -> list[str]:
    """Make different lookups on each rank, and a different number of them; then make as many in a step."""
    draw = np.random.default_rng([seed, dist.get_rank()])
    with _engine(**options) as (whole, sharded, engine):
        found = []
        with torch.no_grad() if seed % 2 else torch.inference_mode():
            for number in range(lookups + int(draw.integers(0, lookups))):
                name = str(draw.choice(MODULES))
                features = _random_lookup(draw, name)
                differing = _differing(sharded[name](features), whole[name](features))
                found += [f"{name}, lookup {number}: {each}" for each in differing]
        engine.serve_evaluation()
        for step in range(lookups):
            engine.begin_step({})
            looked_up = {name: _random_lookup(draw, name) for name in MODULES}
            with torch.no_grad():
                before = {name: sharded[name](features) for name, features in looked_up.items()}
            trained = {name: sharded[name](features) for name, features in looked_up.items()}
            engine.end_forward()
            engine.end_backward()
            for name, features in looked_up.items():
                expected = whole[name](features)
                differing = _differing(trained[name], expected) + _differing(before[name], expected)
                found += [f"{name}, step {step}: {each}" for each in differing]
        engine.drain()
    return found


@pytest.mark.parametrize(
    ("seed", "ranks", "options"),
    [
        (0, 1, {}),
        (2, 3, {}),
        (3, 2, {"dedup": False}),
        (4, 4, HOT),
        (5, 4, {"planned": True}),
        (6, 2, {"cached": True}),
    ],
)
def test_the_same_function_as_in_training_and_unsharded(seed: int, ranks: int, options: dict[str, Any]) -> None:
    assert run_distributed(_looked_up, ranks, seed, 12, options) == [[]] * ranks


def _trained(planned: bool) -> list[str]:
    """Look up all rows on every rank, so that Adam updates all rows in every step; unsharded, one module has the ids of all.

    The features have another order in each step and on each rank.
    """
    wrong = []
    for name, (kind, options) in {name: SETTINGS[name] for name in ("sgd", "adagrad", "adam")}.items():
        given = {"lr": options["lr"], "eps": options.get("eps", 0.0)}
        table = TableOptimizer(kind, given if name != "sgd" else {"lr": options["lr"]}, sparse_adam=name == "adam")
        with _engine(planned, table) as (whole, sharded, engine):
            optimizer = kind(whole.parameters(), **options)
            for step in range(3):
                engine.begin_step(_all_rows(step + 1, dist.get_rank()) if step < 2 else None)
                lookups = [_all_rows(step, rank) for rank in range(dist.get_world_size())]
                _loss(sharded, lookups[dist.get_rank()]).backward()
                engine.end_backward()
                (sum(_loss(whole, each) for each in lookups) / len(lookups)).backward()
                optimizer.step()
                optimizer.zero_grad()
            engine.drain()
            for key, weight in whole.named_parameters():
                found = engine.tables.full_weight(key)
                if not torch.allclose(found, weight, rtol=1e-5, atol=1e-6):
                    wrong.append(f"{name}, {key}: {(found - weight).abs().max():.1e}")
    return wrong


def _all_rows(step: int, rank: int) -> dict[str, KeyedJaggedTensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.tensor([ROWS - 7, 0, 7])
    found = {}
    for name, keys in FEATURES.items():
        ids = torch.cat([torch.randperm(ROWS, generator=draw) for _ in keys])
        weights = torch.rand(len(ids), generator=draw) if name == "weighted" else None
        first = (step + rank) % len(keys)
        found[name] = KeyedJaggedTensor([*keys[first:], *keys[:first]], ids, weights, lengths.repeat(len(keys)))
    return found


def _loss(modules: nn.ModuleDict, lookups: dict[str, KeyedJaggedTensor]) -> Tensor:
    losses: Any = 0.0
    for name, features in lookups.items():
        found = modules[name](features)
        # the caller may change rows in place
        values = [each.values().mul_(0.5) for each in found.values()] if isinstance(found, dict) else [found.values()]
        losses = losses + sum((each * torch.arange(each.shape[1])).square().mean() for each in values)
    return losses


@pytest.mark.parametrize(("ranks", "planned"), [(2, False), (4, True)])
def test_rows_are_updated_as_unsharded_whatever_their_plan_and_width(ranks: int, planned: bool) -> None:
    assert run_distributed(_trained, ranks, planned) == [[]] * ranks


# -- in between


def _ids(values: list[int], name: str = "rows") -> KeyedJaggedTensor:
    """Return the same ids for every feature of a module."""
    keys = FEATURES[name]
    return KeyedJaggedTensor(keys, torch.tensor(values * len(keys)), lengths=torch.tensor([len(values)] * len(keys)))


def _between_steps() -> None:
    """Look up rows between two steps: they have all updates of the first, and prefetched rows stay right."""
    rank = dist.get_rank()
    with _engine() as (whole, sharded, engine):
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"rank 1.*'a'"), torch.no_grad():  # all ranks continue after the error
            sharded["rows"](_ids([ROWS * rank]))
        for step in range(4):
            ids = [_ids([step, 2 * rank, 7]), _ids([step + 1, 2 * rank, 7])]
            engine.begin_step({"rows": ids[1]})
            sharded["rows"](ids[0])["a"].values().square().sum().backward()
            engine.end_backward()
            for other in range(dist.get_world_size()):
                (whole["rows"](_ids([step, 2 * other, 7]))["a"].values().square().sum() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for each in ids * (rank * step):  # patient gradients are still unsent
                    torch.testing.assert_close(_parts(sharded["rows"](each)), _parts(whole["rows"](each)))
            engine.serve_evaluation()
        totals = engine.statistics()
        assert totals["predicted_lookups"] == 3 and totals["tokens"] == 4 * 12, "lookups outside of steps are not counted"


def test_between_steps() -> None:
    run_distributed(_between_steps, 2)


def _fails(look_up: Callable[[nn.ModuleDict, OverlapEngine], Any]) -> str:
    with _engine() as (_, sharded, engine), pytest.raises((ValueError, RuntimeError)) as caught:
        look_up(sharded, engine)
    return f"{caught.type.__name__}: {caught.value}"


def _wrong_id_on_the_last_rank(sharded: nn.ModuleDict, engine: OverlapEngine) -> None:
    if dist.get_rank() == 2:
        with torch.no_grad():
            sharded["bags"](_ids([ROWS], "bags"))
    engine.serve_evaluation()


def _some_train_on(sharded: nn.ModuleDict, engine: OverlapEngine) -> None:
    if dist.get_rank():
        engine.begin_step({})
    sharded["rows"](_ids([1]))


def _backward_outside_of_steps(sharded: nn.ModuleDict, engine: OverlapEngine) -> None:
    sharded["rows"](_ids([1]))["a"].values().sum().backward()


@pytest.mark.parametrize(
    ("look_up", "parts"),
    [
        (_wrong_id_on_the_last_rank, ["ValueError", "'bags (dim 8)'", "rank 2", "'d'", f"id {ROWS}"]),
        (_some_train_on, ["RuntimeError", "Ranks [0]", "outside of a training step", "serve_evaluation"]),
        (_backward_outside_of_steps, ["ValueError", "'rows'", "outside of a training step"]),
    ],
)
def test_errors_are_those_of_all_ranks(look_up: Callable[..., Any], parts: list[str]) -> None:
    for error in run_distributed(_fails, 3, look_up):
        assert all(part in error for part in parts), error


def _leaves() -> None:
    with _engine() as (_, sharded, _):
        if dist.get_rank():
            with torch.no_grad():
                sharded["rows"](_ids([1]))


def test_a_rank_that_does_not_evaluate_is_no_hang() -> None:
    with pytest.raises(RankFailed, match="rank 1"):
        run_distributed(_leaves, 2)
