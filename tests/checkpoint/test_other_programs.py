"""Checkpoints of other programs: loops with TorchRec, files of state dicts, and folders of torch.distributed.checkpoint."""

from __future__ import annotations

import os
import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.checkpoint import sharded_folder
from lightning_freescale.checkpoint.conversion import read_checkpoint
from lightning_freescale.checkpoint.held_files import CONVERTED
from lightning_freescale.checkpoint.other_programs import as_checkpoint, rename_keys, with_optimizer_states
from lightning_freescale.command_line.main import main
from lightning_freescale.testing import run_distributed
from tests.checkpoint.fits import Seen, fit
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
            torch.save(entries["model"], folder / "one_rank.pt")
            torch.save({f"module.{name}": value for name, value in whole["module"].items()}, folder / "bare.pt")

    result = loop(STEPS, AFTER, save)
    sharded_folder.LARGE = 100  # weights and states are read when they are loaded
    return result, _resume(folder / "dcp", dedup=False)


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
    with pytest.raises(ValueError, match=r"one_rank.pt .*ShardedTensor.*torch.distributed.checkpoint.save"):
        read_checkpoint(made.folder / "one_rank.pt")


@pytest.mark.slow
def test_one_rank_and_converted_files_continue_as_well(made: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("dcp", "gathered.pt"):
        main(["convert", str(made.folder / name), str(tmp_path / f"{name}.ckpt")])
        printed = capsys.readouterr().out
        assert "left out: epoch\nwrote the checkpoint to" in printed
        for path in (made.folder / name, tmp_path / f"{name}.ckpt"):
            for ranks in (1, 2):
                ours = run_distributed(_resume, ranks, path)[0]
                _assert_continues(ours, made.result)
                assert len(ours["said"]) == 1 and "without epoch. " in ours["said"][0], ours["said"]


def _weights(path: Path, strict: bool = True) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the weights that validation has loaded, and the warnings."""
    module = Ported()
    module.strict_loading = strict
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
        assert ["epoch" in each for each in said] == [True] * (name == "dcp"), said
    ours = run_distributed(_resume, 2, made.folder / "bare.pt")[0]
    assert len(ours["said"]) == 1 and "optimizer states of net.embeddings.embeddings.item.weight" in ours["said"][0]


def test_tensors_that_the_module_does_not_have_are_not_read(tmp_path: Path) -> None:
    path, weights = tmp_path / "dcp", dict(Ported().state_dict())
    dcp.save({"model": {**weights, "spare": torch.zeros(sharded_folder.LARGE)}}, checkpoint_id=path, no_dist=True)
    places = dcp.FileSystemReader(path).read_metadata().storage_data
    (place,) = (each for index, each in places.items() if index.fqn == "model.spare")
    with open(path / place.relative_path, "r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.length))
    found, _ = run_distributed(_weights, 1, path, False)[0]
    assert_same(found, weights)


# -- optimizer states


class Start(L.Callback):
    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self.states = deepcopy(state["optimizer_states"][0]["state"])


def _started(path: Path, *optimizers: str) -> dict[str, tuple[dict[int, Any], str]]:
    """Return the states of all parameters at the start of a fit from ``path``, and the warning, by the optimizer of the fit."""
    found = {}
    for optimizer in optimizers:
        start = Start()
        result = fit(partial(Seen, optimizer), resume=path, callbacks=[start], max_epochs=1)
        said = [text for text in result.warned if "another program" in text]
        assert len(said) == (dist.get_rank() == 0)
        found[optimizer] = start.states, "".join(said)
    return found


@pytest.mark.slow
def test_states_of_the_same_optimizer_are_loaded_and_others_are_named(tmp_path: Path) -> None:
    """Load Adam's states with TorchRec's names into Adam and other optimizers."""
    weights = Seen().net.state_dict()
    adam = {
        name: {"exp_avg": torch.rand(value.shape), "exp_avg_sq": torch.rand(value.shape)} for name, value in weights.items()
    }
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, of_parameter in adam.items():
        prefix, *parts = ("", "exp_avg", "exp_avg_sq") if "hidden" in name else ("t.", "momentum1", "exp_avg_sq")
        states[name] = {f"{prefix}{part}": value for part, value in zip(parts, of_parameter.values())}
        if "hidden" in name:
            states[name]["step"] = torch.tensor(5.0)
    states["__warmup"] = {"warmup": torch.ones(1)}
    torch.save({"model": weights, "optimizer": {"state": states}, "seed": 3}, tmp_path / "adam.pt")
    found = run_distributed(_started, 2, tmp_path / "adam.pt", "adam", "sgd", "adagrad")[0]
    loaded, said = found["adam"]
    assert_same(loaded, {index: {**each, "step": torch.tensor(5.0)} for index, each in enumerate(adam.values())})
    assert "without optimizer.state.__warmup, seed. Loops" in said
    for optimizer in ("sgd", "adagrad"):
        left, said = found[optimizer]
        assert all(f"exp_avg and exp_avg_sq of net.{name}" in said for name in adam)
        assert [float(each["sum"].abs().max()) for each in left.values()] == [0.0] * (4 if optimizer == "adagrad" else 0)
    for name in adam:
        states[name].pop("step", None)
    torch.save({"model": weights, "optimizer": {"state": states}}, tmp_path / "uncounted.pt")
    left, said = run_distributed(_started, 1, tmp_path / "uncounted.pt", "adam")[0]["adam"]
    assert not left and all(f"of net.{name}, because the number of updates is missing" in said for name in adam)


def _started_alone(states: dict[str, dict[str, Any]]) -> tuple[dict[int, Any], list[str]]:
    """Return the states of a linear layer in a new optimizer, and what is left out."""
    module = torch.nn.Linear(2, 3)
    converted = {"optimizer_states": states, "left_out": []}
    saved, _, left_out = with_optimizer_states(converted, module, [torch.optim.Adam(module.parameters())], None, None)
    return saved[0]["state"], left_out


def test_states_without_a_step_have_the_most_steps_of_the_others() -> None:
    weight, bias = ({name: torch.rand(shape) for name in ("exp_avg", "exp_avg_sq")} for shape in ((3, 2), (3,)))
    for step in ({}, {"step": torch.ones(2)}):
        loaded, left_out = _started_alone({"weight": {**weight, **step}, "bias": {**bias, "step": 5}, "frozen": {"step": 3}})
        assert_same(loaded, {index: {**each, "step": torch.tensor(5.0)} for index, each in enumerate((weight, bias))})
        assert not left_out
    loaded, left_out = _started_alone({"weight": {**weight, "exp_avg": 0.5, "step": 1}, "bias": bias})
    assert list(loaded) == [1] and left_out == ["exp_avg and exp_avg_sq of weight"], "a number is no state of a parameter"


def test_states_belong_to_the_names_of_parameters() -> None:
    """Name states with the prefixes of two optimizers and a wrapper, and with those of other modules."""
    state = {"sum": torch.ones(2)}

    def found(*names: str) -> tuple[list[str], list[str]]:
        weights = {name: torch.zeros(2) for name in ("a.w", "b.w", "w")}
        entries = {"model": weights, "optimizer": {"state": dict.fromkeys(names, state)}}
        converted = as_checkpoint(entries, "a.pt", False)[CONVERTED]
        return list(converted["optimizer_states"]), [name.removeprefix("optimizer.state.") for name in converted["left_out"]]

    assert found("fused.a.w", "dense.module.b.w", "dense.__warmup") == (["a.w", "b.w"], ["dense.__warmup"])
    assert found("encoder.b.w", "encoder.other", "b.w") == (["b.w"], ["encoder.b.w", "encoder.other"])
    assert found("encoder.b.w", "encoder.other", "module.a.w") == (["a.w"], ["encoder.b.w", "encoder.other"])
    assert found("dense.w", "w") == (["w"], ["dense.w"])
    assert found("first.w", "second.w") == ([], ["first.w", "second.w"])


# -- names


def _renamed(weights: list[str], expected: list[str], strict: bool = True) -> list[str]:
    given = {"state_dict": dict.fromkeys(weights), CONVERTED: {"format": "a file", "optimizer_states": {weights[0]: {}}}}
    found = rename_keys(given, "Model", expected, strict, "a.pt")
    assert list(found[CONVERTED]["optimizer_states"]) == list(found["state_dict"])[:1]
    return list(found["state_dict"])


def test_keys_may_differ_by_a_prefix() -> None:
    model = ["net.embeddings.item.weight", "net.over.weight"]
    for prefix in ("", "net.", "model.", "module.", "_dmp_wrapped_module.module.", "net.net.", "a.b.net."):
        assert _renamed([f"{prefix}embeddings.item.weight", f"{prefix}over.weight"], model) == model, prefix
    assert _renamed(["model.a", "model.b"], ["a", "b"]) == ["a", "b"]
    assert _renamed(["a.a.w"], ["a.w"]) == ["a.w"]
    assert _renamed(["x.w"], ["one.w", "x.w"], strict=False) == ["x.w"], "the same names are better than another prefix"
    assert _renamed(["w", "v"], ["w", "net.w", "net.v"], strict=False) == ["w", "v"], "they are better for one name, too"
    assert _renamed(["w", "extra"], ["net.w", "net.v"], strict=False) == ["net.w", "net.extra"]
    assert _renamed(["a.w", "b.w", "old"], ["net.a.w", "net.b.w"], strict=False) == ["net.a.w", "net.b.w", "net.old"]
    assert _renamed(["a.b.w", "a.c.w", "d.w"], ["b.w", "c.w"], strict=False) == ["b.w", "c.w", "d.w"]


@pytest.mark.parametrize(
    ("weights", "expected", "strict", "said"),
    [
        (
            ["a", "b"],
            ["net.a", "net.b", "scale"],
            True,
            "a.pt.*such as a,.*such as net.a: missing keys scale.*freescale convert",
        ),
        (["net.a", "net.b"], ["a"], True, "missing keys a; unexpected keys net.a, net.b"),
        (["a"], ["query.a", "item.a"], False, "several prefixes fit, such as in item.a and query.a"),
        (["a.w", "b.w"], ["c.w", "d.w"], False, "several prefixes fit, such as in c.w and d.w"),
        (["a"], ["b"], False, "missing keys b; unexpected keys a.*dcp_to_torch"),
        (["a"], [], True, "unexpected keys a"),
    ],
)
def test_other_names_are_refused(weights: list[str], expected: list[str], strict: bool, said: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){said}") as refused:
        _renamed(weights, expected, strict)
    assert ("strict_loading=False" in str(refused.value)) == strict


# -- what is not a checkpoint


def _damage_of(name: str, folder: Path) -> Path:
    path = folder / name
    table = torch.arange(12.0).view(6, 2)
    if name == "no model":
        dcp.save({"app": {"tables": {"a": table}, "count": 3}}, checkpoint_id=path, no_dist=True)
    elif name == "objects":
        dcp.save({"model": {"b": Path("b"), "c": 3}}, checkpoint_id=path, no_dist=True)
    elif name == "numbered":
        torch.save({"model": {0: table}}, path)
    elif name == "twice":
        optimizers = {each: {"state": {"a": {"sum": table}}} for each in ("first", "second")}
        torch.save({"model": {"a": table}, **optimizers}, path)
    else:
        dcp.save({"model": {"a": table}}, checkpoint_id=path, no_dist=True)
        (file,) = [path / ".metadata"] if name == "cut metadata file" else path.glob("*.distcp")
        content = file.read_bytes()
        file.unlink()
        if name != "lost file":
            file.write_bytes(bytes(len(content)) if name == "cleared file" else content[:-100])
    return path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no model", "folder of torch.distributed.checkpoint.*entries are tables, count.*dcp_to_torch.*freescale convert"),
        ("objects", "folder of torch.distributed.checkpoint.*entries are model"),
        ("numbered", "file of torch.save.*no state dict of a model"),
        ("twice", "states of a in two optimizers.*second"),
        ("lost file", "incomplete.*distcp is missing"),
        ("cut metadata file", r"incomplete.*\.metadata cannot be read"),
        ("cleared file", "damaged: model.a cannot be read"),
        ("cut file", "incomplete.*distcp has .* bytes instead of"),
    ],
)
def test_what_cannot_be_loaded_names_the_format_and_what_helps(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"(?s){said}") as refused:
        read_checkpoint(_damage_of(name, tmp_path))
    assert ("damaged" in str(refused.value)) == name.endswith("file")
    assert "--trust" not in str(refused.value) and "weights_only" not in str(refused.value)


def test_other_entries_than_tensors_are_left_out(tmp_path: Path) -> None:
    weights, extra = {"w": torch.ones(2)}, {"norm._extra_state": {"scale": 2}}
    torch.save({**weights, **extra}, tmp_path / "bare")
    torch.save({"model": {**weights, **extra, "version": 3}, "epoch": 1}, tmp_path / "file")
    dcp.save({"model": {**weights, "norm._extra_state": Path("a")}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    left_out = {"bare": [*extra], "file": ["model.norm._extra_state", "model.version", "epoch"]}
    for name, names in {**left_out, "dcp": ["model.norm._extra_state"]}.items():
        found = read_checkpoint(tmp_path / name)
        assert_same(found["state_dict"], weights)
        assert found[CONVERTED]["left_out"] == names


def test_optimizer_states_without_names_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Save a folder of nested entries, with an optimizer of torch, a schedule and an object that is not read."""
    module = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    entries = {"model": module.state_dict(), "dense": optimizer.state_dict(), "schedule": {"last": 3}, "where": Path("a")}
    dcp.save({"app": entries}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save({"app": {**entries, "where": "a"}}, tmp_path / "file.pt")
    for name in ("dcp", "file.pt"):
        target = tmp_path / f"{name}.ckpt"
        main(["convert", str(tmp_path / name), str(target)])
        printed = capsys.readouterr().out
        for line in ("left out: dense (its states have numbers", "left out: schedule\n", "left out: where\n"):
            assert line in printed
        assert_same(torch.load(target, weights_only=True)["state_dict"], dict(module.state_dict()))
        with pytest.raises(SystemExit):
            main(["convert", str(tmp_path / name), str(target)])
        assert "exists. Pass another target\n" in capsys.readouterr().err
