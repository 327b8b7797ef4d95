"""Checkpoints outside of a run: conversion, loading into the plain module, and comparison."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.checkpoint import conversion, sharded_folder
from lightning_freescale.checkpoint.spread_tensors import DeferredTensor, Piece, SpreadTensors
from lightning_freescale.checkpoint.unsharded import merge, split
from lightning_freescale.command_line.main import main
from lightning_freescale.embeddings.row_order import RowOrder
from lightning_freescale.testing import run_distributed
from tests.checkpoint.conftest import Saved
from tests.checkpoint.fits import TABLE, Large, fit
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import REPEATS, Samples, collate, trainer


def test_one_file_of_a_folder_is_what_a_single_one_would_be_and_back(saved: Saved, tmp_path: Path) -> None:
    back = tmp_path / "sharded.ckpt"
    main(["consolidate", str(saved.folder / "single4.ckpt"), str(back), "--to", "sharded"])
    assert list(back.glob("*.distcp")), "the tables are in files of their own"
    assert (back / "meta.pt").stat().st_size < 500_000
    expected = torch.load(saved.folder / "single4.ckpt", weights_only=True)
    for source in (saved.folder / "sharded4.ckpt", back):
        main(["consolidate", str(source), str(tmp_path / "single.ckpt"), "--to", "single", "--force"])
        found = torch.load(tmp_path / "single.ckpt", weights_only=True)
        assert found.keys() == expected.keys()
        for part in ("state_dict", "optimizer_states", "loops"):
            torch.testing.assert_close(found[part], expected[part], rtol=0, atol=0)
    resumed = run_distributed(fit, 2, Large, resume=back)[0]
    assert resumed.losses == saved.whole.losses[4:]
    assert_same(resumed.weights, saved.whole.weights)


def _opened_by_one(path: Path) -> list[torch.Size]:
    shapes = []
    if dist.get_rank() == 0:  # such as after a fit, to export it
        with conversion.open_checkpoint(path) as file:
            shapes = [weight.shape for weight in Large.load_from_checkpoint(file).state_dict().values()]
    dist.barrier()
    return shapes


def test_the_plain_module_loads_either(saved: Saved, tmp_path: Path) -> None:
    expected = torch.load(saved.folder / "single4.ckpt", weights_only=True)["state_dict"]
    for kind in ("single", "sharded"):
        with conversion.open_checkpoint(saved.folder / f"{kind}4.ckpt") as file:
            module = Large.load_from_checkpoint(file)
        assert_same(dict(module.state_dict()), dict(expected))
        main(["consolidate", str(saved.folder / f"{kind}4.ckpt"), str(tmp_path / "weights.pt"), "--force"])
        Large().load_state_dict(torch.load(tmp_path / "weights.pt"))
    shapes = run_distributed(_opened_by_one, 2, saved.folder / "sharded4.ckpt", timeout=60)
    assert shapes[0] and not shapes[1]


def _predict(folder: Path) -> list[torch.Tensor]:
    data = Samples(24)
    found = []
    for kind in ("single", "sharded"):
        loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, predict_dataset=data, **REPEATS)
        found.append(torch.cat(trainer(devices=1).predict(Large(), loader, ckpt_path=folder / f"{kind}4.ckpt")))
    return found


def test_one_process_predicts_with_either(saved: Saved) -> None:
    single, sharded = run_distributed(_predict, 1, saved.folder)[0]
    assert torch.equal(single, sharded) and len(single.unique()) > 1


@pytest.mark.parametrize("old", ["single4.ckpt", "sharded4.ckpt", "resharded4.ckpt"])
@pytest.mark.parametrize("new", ["single5.ckpt", "sharded5.ckpt"])
def test_changes_are_the_rows_that_a_step_has_updated(old: str, new: str, saved: Saved, tmp_path: Path) -> None:
    """Compare also with a folder that was made from a file, which has another order of rows."""
    source = saved.folder / old
    if old.startswith("re"):
        source = tmp_path / old
        conversion.write_folder(conversion.read_checkpoint(saved.folder / "single4.ckpt"), source)
    main(["changes", str(source), str(saved.folder / new), str(tmp_path / "changes.pt")])
    changes = torch.load(tmp_path / "changes.pt", weights_only=True)
    before, after = (torch.load(saved.folder / f"single{step}.ckpt", weights_only=True)["state_dict"] for step in (4, 5))
    assert 0 < len(changes[TABLE]["ids"]) < 1000, "most rows have not changed"
    for name, changed in changes.items():
        before[name][changed["ids"]] = changed["rows"]
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert torch.equal(changes[TABLE]["ids"], changes[TABLE]["ids"].unique())


def _write(table: torch.Tensor, parts: int, folder: Path) -> None:
    order, bounds = RowOrder.hashed(len(table)), torch.linspace(0, len(table), parts + 1).long().tolist()
    key, shape = ("table",), tuple(table.shape)
    rows = [(slice(*part), slice(0, shape[1])) for part in pairwise(bounds)]
    pieces = [(Piece(key, shape, table.dtype, at, order), table[order.ids(at[0].start, at[0].stop)]) for at in rows]
    entries = {"state_dict": {"table": DeferredTensor.placeholder(key, shape, table.dtype)}}
    sharded_folder.write(entries, folder, [SpreadTensors(pieces, None, table.device)], None)


def test_changes_between_folders_of_different_numbers_of_ranks(tmp_path: Path) -> None:
    old = torch.rand(101, 2)
    new = old.clone()
    new[[3, 50, 99]] += 1
    for table, ranks in ((old, 2), (new, 3)):
        _write(table, ranks, tmp_path / str(ranks))
    found = conversion.changed_rows(*(conversion.read_checkpoint(tmp_path / ranks) for ranks in "23"))["table"]
    assert found["ids"].tolist() == [3, 50, 99] and torch.equal(found["rows"], new[found["ids"]])


def test_changes_are_those_of_matrices() -> None:
    old, new = ({"state_dict": {"bias": torch.full((2,), value)}} for value in (0.0, 1.0))
    assert conversion.changed_rows(old, new) == {}


def test_changes_of_another_module_are_refused(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.load(saved.folder / "single4.ckpt", weights_only=True)["state_dict"]
    others = {TABLE: {TABLE: torch.zeros(3, 2)}, "(3, 2)": {**state, TABLE: torch.zeros(3, 2)}}
    for named, other in others.items():
        torch.save({"state_dict": other}, tmp_path / "other.ckpt")
        with pytest.raises(SystemExit):
            main(["changes", str(saved.folder / "single4.ckpt"), str(tmp_path / "other.ckpt"), str(tmp_path / "changes.pt")])
        printed = capsys.readouterr().err
        assert named in printed if named != TABLE else "net.hidden.0.weight" in printed


# -- merging of table states into the state dict of an optimizer, and splitting

LAYOUT = [["a", "table", "b"], ["other"]]
TABLES = {"table", "other"}


def _dense() -> dict:
    parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in "ab"}
    optimizer = torch.optim.Adagrad([{"params": list(parameters.values())}, {"params": [], "lr": 0.5}])
    for value, parameter in enumerate(parameters.values()):
        optimizer.state[parameter]["sum"].fill_(value)
    return optimizer.state_dict()


def test_parameters_are_numbered_as_the_user_gave_them_and_back() -> None:
    dense = _dense()
    full = merge(dense, LAYOUT, TABLES, {"table": {"sum": torch.full((3, 2), 7.0)}}, {"table": 4})
    assert [group["params"] for group in full["param_groups"]] == [[0, 1, 2], [3]] and full["param_groups"][1]["lr"] == 0.5
    assert {index: float(state["sum"].flatten()[0]) for index, state in full["state"].items()} == {0: 0, 1: 7, 2: 1}
    back, states, step = split(full, LAYOUT, TABLES)
    assert back["param_groups"] == dense["param_groups"] and step == 4 and list(states) == ["table"]
    assert {i: float(s["sum"][0]) for i, s in back["state"].items()} == {0: 0.0, 1: 1.0}
    with pytest.raises(ValueError, match=r"\[2, 0\].*\[3, 1\]"):
        split(dense, LAYOUT, TABLES)
