"""Checkpoints of other programs: loops with TorchRec, files of state dicts, and folders of torch.distributed.checkpoint."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.command_line.main import main
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import trainer
from tests.helpers.torchrec_loop import Ported, batch, gathered, loop

STEPS, AFTER = 4, 3
"""The loop trains four steps and saves after three of them; our run does the fourth step."""


def _resume(path: Path, **options: Any) -> dict[str, Any]:
    """Return the weights and optimizer states after the last step of the loop, from a checkpoint, and the warnings."""
    ranks = int(os.environ["WORLD_SIZE"])
    shares = [dist.get_rank()] if ranks == 2 else [0, 1]
    torch.manual_seed(7)
    module = Ported()
    fitting = trainer(devices=ranks, max_epochs=1, strategy=FreeScaleStrategy(**options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting.fit(module, DataLoader([batch(AFTER, shares)], batch_size=None), ckpt_path=path)
    state = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
    states = {key: value["sum"] for key, value in fitting.strategy._extra["in_backward_states"].items()}
    names = [name for group in fitting.strategy.groups.layout() for name in group]
    states |= {names[index]: value["sum"] for index, value in state["optimizer_states"][0]["state"].items()}
    said = [str(each.message) for each in caught if "another program" in str(each.message)]
    return {"weights": state["state_dict"], "states": states, "said": said}


class Loop(NamedTuple):
    """The loop's result, the folder with its checkpoints, and our run from the folder of DCP on two ranks."""

    result: dict[str, Any]
    folder: Path
    ours: dict[str, Any]


def _loop_and_ours(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    def save(model: Any, optimizer: Any) -> None:
        entries = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
        dcp.save(entries, checkpoint_id=folder / "dcp")
        dcp.save(model.state_dict(), checkpoint_id=folder / "bare_dcp")
        whole = {"module": gathered(entries["model"]), "optimizer": gathered(entries["optimizer"]), "epoch": 3}
        if dist.get_rank() == 0:
            torch.save(whole, folder / "gathered.pt")
            torch.save({f"module.{name}": value for name, value in whole["module"].items()}, folder / "bare.pt")

    return loop(STEPS, AFTER, save), _resume(folder / "dcp", dedup=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    folder = tmp_path_factory.mktemp("loop")
    result, ours = run_distributed(_loop_and_ours, 2, folder)[0]
    return Loop(result, folder, ours)


def _assert_continues(ours: dict[str, Any], loop: dict[str, Any]) -> None:
    """Compare the weights and the sums of Adagrad after the last step."""
    near = {"rtol": 1e-6, "atol": 1e-7}
    assert_same({name.removeprefix("net."): value for name, value in ours["weights"].items()}, loop["weights"], **near)
    sums = {name.partition(".")[2]: state for name, state in loop["states"].items()}
    assert sums.keys() == {name.removeprefix("net.") for name in ours["states"]}
    for name, state in sums.items():
        (found,) = (value for key, value in state.items() if key != "step")
        torch.testing.assert_close(ours["states"][f"net.{name}"].flatten(), found.flatten(), **near)


def test_a_run_goes_on_from_a_folder_of_dcp_as_the_loop_does(made: Loop) -> None:
    _assert_continues(made.ours, made.result)
    assert len(made.ours["said"]) == 1 and "epoch" in made.ours["said"][0], made.ours["said"]


@pytest.mark.slow
def test_one_rank_and_converted_files_continue_as_well(made: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("dcp", "gathered.pt"):
        main(["convert", str(made.folder / name), str(tmp_path / f"{name}.ckpt")])
        printed = capsys.readouterr().out
        assert "left out: epoch" in printed and "7 tensors and the optimizer states of 7 parameters" in printed
        for path in (made.folder / name, tmp_path / f"{name}.ckpt"):
            for ranks in (1, 2):
                ours = run_distributed(_resume, ranks, path)[0]
                _assert_continues(ours, made.result)
                assert len(ours["said"]) == 1 and "without epoch. " in ours["said"][0], ours["said"]


def _weights(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the weights that validation has loaded, and the warnings."""
    module = Ported()
    validating = trainer(devices=int(os.environ["WORLD_SIZE"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        validating.validate(module, DataLoader([batch(AFTER, [0])], batch_size=None), ckpt_path=path, verbose=False)
    weights = validating.strategy.lightning_module_state_dict()
    return weights, [str(each.message) for each in caught if "another program" in str(each.message)]


@pytest.mark.slow
def test_bare_state_dicts_load_in_every_form(made: Loop, tmp_path: Path) -> None:
    expected = torch.load(made.folder / "gathered.pt", weights_only=True)["module"]
    for name in ("bare_dcp", "bare.pt", "dcp"):
        found, said = run_distributed(_weights, 2, made.folder / name)[0]
        assert_same({key.removeprefix("net."): value for key, value in found.items()}, expected)
        assert ["epoch" in each for each in said] == [name == "dcp"], said
    ours = run_distributed(_resume, 2, made.folder / "bare.pt")[0]
    assert len(ours["said"]) == 1 and "optimizer states of net.embeddings.embeddings.item.weight" in ours["said"][0]
