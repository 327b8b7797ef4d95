"""Fits by plans of TorchRec's functions, unchanged: they have the results of "ddp", overlapped and with TorchRec's exchange."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torchrec import EmbeddingCollection
from torchrec.distributed.types import ParameterSharding, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.data_parallel import without_data_parallel
from lightning_freescale.embeddings.shards import kernels
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import Batch
from tests.helpers.overlap_training import continued, departures
from tests.helpers.recommender import tables
from tests.helpers.torchrec_features import (
    BOTH,
    BY_TORCHREC,
    CLOSE,
    DDP,
    FIELDS,
    HALF,
    OVERLAPPED,
    STEPS,
    Feature,
    Planned,
    case,
    outcome,
)

ALL_KINDS = case("column", cat="data", brand="data", category="row", mood="grid", price="data", place="table_row")


def test_as_under_ddp() -> None:
    assert outcome(Feature(ALL_KINDS, BOTH)) == "equal"


# -- data-parallel tables


MIXED = case("row", cat="data", brand="data", price="data", max_epochs=2)


def _continued_and_fitted_again(folder: Path) -> tuple[dict[str, list[Any]], str, list[Any]]:
    ways = {"ours": (OVERLAPPED, DDP), "by ddp": (DDP, OVERLAPPED)}
    runs = {name: continued(MIXED, str(folder / f"{name}.ckpt"), STEPS, *way) for name, way in ways.items()}
    module = Planned()
    again = [replace(each, make=lambda: module) for each in (MIXED, MIXED, case("row"))]
    module.bags.scale, attributes = 1.0, []
    for each in again[:2]:
        each.fit(OVERLAPPED)
        attributes.append(module.bags.scale)
        module.bags.scale = 5.0
    with pytest.raises(ValueError, match="already sharded by another plan") as raised:
        again[2].fit(OVERLAPPED)
    taken = Planned()
    taken.bags._env = None
    with pytest.raises(ValueError, match=r"'bags' has attributes \['_env'\]"):
        replace(MIXED, make=lambda: taken).fit(OVERLAPPED)
    return runs, str(raised.value), attributes


@pytest.mark.slow
def test_checkpoints_and_later_fits_with_data_parallel_tables(tmp_path: Path) -> None:
    (runs, text, attributes), *others = run_distributed(_continued_and_fitted_again, 2, tmp_path)
    assert departures(dict.fromkeys(runs, MIXED), [runs, *(each[0] for each in others)], **CLOSE) == []
    assert "data-parallel" in text and attributes == [1.0, 5.0]


def test_data_parallel_tables_on_the_meta_device_are_initialised() -> None:
    configs = [replace(config, init_fn=partial(nn.init.constant_, val=0.5)) for config in tables()]
    module = nn.ModuleDict({"x": EmbeddingCollection(tables=configs, device=torch.device("meta"))})
    plan = ShardingPlan({"x": {"cat": ParameterSharding("data_parallel", "dense")}})
    ((collection, _),) = without_data_parallel(find_collections(module), plan)
    assert [table.name for table in collection.tables] == ["item"]
    weights = {name: weight for name, weight in module.named_parameters() if not weight.is_meta}
    assert {name: set(weight.flatten().tolist()) for name, weight in weights.items()} == {"x.embeddings.cat.weight": {0.5}}
    apply_optimizer_in_backward(torch.optim.SGD, module["x"].embeddings["cat"].parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"'x\.embeddings\.cat\.weight' is data-parallel.*configure_optimizers"):
        without_data_parallel(find_collections(module), plan)
    plain = nn.ModuleDict({"x": nn.Embedding(5, 4, padding_idx=0, device="meta")})
    found = find_collections(plain, {plain["x"]})
    assert without_data_parallel(found, ShardingPlan({"x": {"x": plan.plan["x"]["cat"]}})) == []
    assert plain["x"].weight.is_meta, "its reset_parameters knows the padding row"


# -- fields of ParameterSharding


class Inspected(Planned):
    """Keeps the options of TorchRec's kernels, and the type of the results."""

    def scores(self, batch: Batch) -> Tensor:
        pooled = self.bags(batch["bags"]).values()
        made = [kernel.emb_module for kernel in kernels(self.bags)]
        self.seen = [(pooled.dtype, each.bounds_check_mode_int, each.optimizer_args.stochastic_rounding) for each in made]
        return super().scores(batch)


class Beyond(Planned):
    def scores(self, batch: Batch) -> Tensor:
        batch["bags"].values()[-1:] += 30  # of the last feature
        return super().scores(batch)


def _inspected() -> tuple[list[Any], str]:
    found = []
    for fields, way in ((FIELDS, OVERLAPPED), (FIELDS | HALF, BY_TORCHREC)):
        module = Inspected()
        replace(case("row", fields=fields), make=lambda module=module: module).fit(way)
        found.append(set(module.seen))
    with pytest.raises(ValueError, match="num_embeddings=30") as raised:
        case("row", fields=FIELDS, make=Beyond).fit(OVERLAPPED)
    return found, str(raised.value)


def test_kernels_receive_the_fields_of_a_plan_and_ids_are_checked() -> None:
    for (overlapped, by_torchrec), text in run_distributed(_inspected, 2):
        assert overlapped == {(torch.float32, BoundsCheckMode.IGNORE.value, False)}
        assert by_torchrec == {(torch.float16, BoundsCheckMode.IGNORE.value, False)}
        assert "feature 'word' has id" in text
