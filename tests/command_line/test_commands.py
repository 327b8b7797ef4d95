"""Tests of each command, in this process or in forked ranks."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from lightning_freescale._version import __version__
from lightning_freescale.balance import CostModel
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.balance.simulate import summarize_lengths
from lightning_freescale.command_line.main import COMMANDS, main
from lightning_freescale.profiling.reporting.document import ExchangeFigures
from lightning_freescale.simulator import Catalogue, Quantity
from lightning_freescale.simulator.quantity import WORDS
from lightning_freescale.simulator.training_step import LADDER
from lightning_freescale.testing import run_distributed
from tests.helpers.reports import TABLES, WORKLOAD, report_of, step
from tests.helpers.shop import write_shop

Fails = Callable[..., str]
CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, devices: 2, max_epochs: 1, logger: false, enable_progress_bar: false, enable_model_summary: false}
model: {class_path: shop.NextItem, init_args: {dim: 4}}
data:
  class_path: lightning_freescale.FreeScaleDataModule.from_interactions
  init_args: {source: visits.csv, batch_size: 4}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    """Return a folder with data and a configuration, which is the current folder."""
    write_shop(tmp_path, users=24)
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["freescale"])
    yield tmp_path
    sys.modules.pop("shop", None)


def test_without_a_command_it_lists_the_commands(capsys: Any, fails: Fails, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["freescale"])
    runpy.run_module("lightning_freescale", run_name="__main__")
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in COMMANDS)
    main(["--version"])
    assert f"lightning-freescale {__version__}" in capsys.readouterr().out
    assert "'simulate'?" in fails("simulat") and "fit, validate" in fails("xyz")


def test_fit_and_test_from_a_config(folder: Path, capfd: Any) -> None:
    """Train and test on two ranks with the package's strategy, and load the weights into the plain module."""

    def run() -> None:
        keep = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=kept", "--trainer.callbacks.filename=last"]
        main(["fit", "--config", "config.yaml", *keep])
        main(["test", "--config", "config.yaml", "--ckpt_path", "kept/last.ckpt"])

    run_distributed(run, 2, init=False)
    assert "24.0" in capfd.readouterr().out, "the test has seen every user once"
    assert "strategy: freescale\n" in Path("run_config.yaml").read_text()
    main(["consolidate", "kept/last.ckpt", "weights.pt"])
    assert torch.load("weights.pt")["items.weight"].shape == (40, 4)


def test_a_wrong_key_is_reported_with_the_nearest(folder: Path, fails: Fails) -> None:
    path = folder / "config.yaml"
    config = path.read_text()
    missed = []
    for right, wrong, nearest in (
        ("model:", "modell:", "model"),
        ("devices:", "devcies:", "devices"),
        ("dim: 4", "dimm: 4", "dim"),
        ("batch_size:", "batchsize:", "batch_size"),
        ("source:", "micro_batch: 2, source:", "micro_batches"),
        ("", "", "max_epochs"),  # which the config has
    ):
        path.write_text(config.replace(right, wrong, 1))
        said = fails("fit", "--config", "config.yaml", *([] if right else ["--trainer.max_epchs=2"]))
        missed += [] if f"Did you mean {nearest!r}?" in said else [(wrong, said)]
    assert missed == []


def test_abbreviations_of_options_are_refused(folder: Path, fails: Fails) -> None:
    """Refuse them, because an abbreviation gets another meaning, or none, when a release adds an option."""
    plan = "--lengths r.csv --ranks 2 --batch-size 1"
    words = [
        f"simulate {plan} --compute-ms 100 --expo 1",
        f"balance {plan} --epoch 1",
        f"simulate {plan} --max-le 5",
        "balance fit r.json --js c.json",
        "convert a b --tru",
        "consolidate a b --forc",
        "changes a b c --forc",
        "profile page r.json -o p.html --lab A",
        "profile compare r.json --forc",
        "fit --config config.yaml --trainer.max_epo 3",
    ]
    said = {each: fails(*each.split()) for each in words}
    assert {each: text for each, text in said.items() if "nrecognized arguments" not in text} == {}


def test_balance_writes_each_sample_of_an_epoch_once(tmp_path: Path, capsys: Any, fails: Fails) -> None:
    lengths, plan = tmp_path / "lengths.txt", tmp_path / "plan.jsonl"
    lengths.write_text("\n".join(str(1 + 37 * n % 200) for n in range(48)))
    words = ["balance", "--lengths", str(lengths), "--ranks", "4", "--batch-size", "3", "--epochs", "2", "--plan", str(plan)]
    main(words)
    printed = capsys.readouterr().out
    assert printed.startswith("lengths.txt: 48 samples") and "4 ranks; cost 320 L + 1 L²; tokens: L" in printed
    assert [printed.count(f"\n{row}  ") for row in ("compute", "tokens ")] == [2, 2]
    assert "epoch 1: imbalance over 4 steps" in printed and str(plan) in printed
    steps = [json.loads(line) for line in plan.read_text().splitlines()]
    for epoch in (0, 1):
        of_epoch = [step for step in steps if step["epoch"] == epoch]
        assert [step["step"] for step in of_epoch] == [0, 1, 2, 3]
        assert all(len(samples) == 3 for step in of_epoch for samples in step["ranks"])
        assert sorted(sample for step in of_epoch for samples in step["ranks"] for sample in samples) == list(range(48))
    assert "--batch-size: '0'" in fails("balance", "--lengths", lengths, "--ranks", 4, "--batch-size", 0)
    tokens = ["balance", "--lengths", str(lengths), "--ranks", "4", "--batch-tokens", "600", "--plan", str(plan)]
    main(tokens)
    ranks = [samples for line in plan.read_text().splitlines() for samples in json.loads(line)["ranks"]]
    assert all(sum(1 + 37 * n % 200 for n in samples) <= 600 for samples in ranks) and len({*map(len, ranks)}) > 1


def test_usage_names_both_words_of_a_command(capsys: Any) -> None:
    for words in (["balance", "fit", "--help"], ["profile", "compare", "--help"]):
        with pytest.raises(SystemExit):
            main(words)
        assert f"usage: freescale {' '.join(words[:2])} " in capsys.readouterr().out


def test_consolidate_writes_only_weights(tmp_path: Path, capsys: Any, fails: Fails) -> None:
    kept, weights = tmp_path / "a.ckpt", tmp_path / "weights.pt"
    torch.save({"state_dict": {"w": torch.arange(3.0)}, "optimizer_states": [1], "path": tmp_path}, kept)
    assert "--trust" in fails("consolidate", kept, weights)
    main(["consolidate", str(kept), str(weights), "--trust"])
    assert "1 tensors" in capsys.readouterr().out and torch.load(weights).keys() == {"w"}
    assert f"{weights} exists" in fails("consolidate", kept, weights, "--trust")
    main(["consolidate", str(kept), str(weights), "--trust", "--force"])
    assert "none.ckpt" in fails("consolidate", tmp_path / "none.ckpt", weights)
    fsspec.register_implementation("lost", "no_such_module.System", errtxt="Install the package lost", clobber=True)
    for scheme, said in (("lost", "Install the package lost"), ("unknown", "Protocol not known: unknown")):
        assert said in fails("consolidate", f"{scheme}://a.ckpt", weights)
    torch.save([1], tmp_path / "list.pt")
    torch.save({"w": 1}, tmp_path / "bare.pt")
    (tmp_path / "cut.ckpt").write_bytes(kept.read_bytes()[:100])
    for name, said in (("list.pt", "a list"), ("bare.pt", "state_dict"), ("", "freescale.json"), ("cut.ckpt", "cut.ckpt")):
        assert said in fails("consolidate", tmp_path / name, tmp_path / "new.pt")


# -- simulate


LENGTHS = np.random.default_rng(0).lognormal(4, 1, 480).round() + 1


@pytest.fixture
def simulated(capsys: Any, tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs the command and returns its output, or its error message if it fails."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, LENGTHS)))

    def run(*words: Any, fails: bool = False, alone: bool = False) -> str:
        files = [] if alone else ["--lengths", lengths, "--batch-size", 8]
        draws = ["--draws", 2] if {"--compute-ms", "--report"} & set(words) else []
        line = ["simulate", *files, "--ranks", "4,16", "--steps", 4, *draws, *words]
        if not fails:
            main([str(word) for word in line])
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in line])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return run


def test_a_table_of_all_techniques_its_assumptions_and_files(simulated: Callable[..., str], tmp_path: Path) -> None:
    files = {kind: tmp_path / f"found.{kind}" for kind in ("json", "html")}
    out = simulated("--compute-ms", "50:100:200", "--json", files["json"], "--page", files["html"])
    assert out.startswith("lengths.txt: 480 samples") and "4 steps of 8 histories" in out
    found = json.loads(files["json"].read_text())
    assert {each["ranks"] for each in found["predicted"]} == {4, 16}
    assert all(each["step"]["word"] == "predicted" for each in found["predicted"])
    assert {each["word"] for each in found["known"].values()} <= set(WORDS)
    assert "<title>Predicted steps</title>" in files["html"].read_text()
    table, _, known = out.partition("assumptions and measurements")
    assert all(", assumed" in line for line in known.splitlines()[1:]), "each figure says what it is"
    assert "rows of all tables                    10,000,000, assumed" in known and "assumed: --compute-ms" in known
    assert not any(line != line.rstrip() for line in out.splitlines())
    rows, omitted = table.split("no effect: ")[0], table.split("no effect: ")[1].splitlines()[0].split(", ")
    shown = [name for name in LADDER if f"\n       {name}  " in rows or f"4  {name} " in rows]
    assert sorted(shown + omitted) == sorted(LADDER) and {"plain", "balance"} <= set(shown) and "+ two levels" in omitted


def test_without_compute_it_predicts_balancing_alone(simulated: Callable[..., str]) -> None:
    out = simulated("--max-length", 100)
    assert "imbalance (max / mean over ranks)" in out and "max 100" in out and "techniques" not in out


def test_options_replace_assumptions(simulated: Callable[..., str], tmp_path: Path) -> None:
    network = tmp_path / "network.json"
    network.write_text('{"bandwidth": {"value": 1e9, "word": "measured", "source": "nccl-tests"}, "ranks_per_node": 2}')
    others = ("--host-ms", 3, "--dense-mb", "10:20:40", "--exponent", 0.7, "--rows", 100000, "--network", network)
    out = simulated("--compute-ms", 100, "--attention", 0.2, "--contention", 0.07, "--late-weights", 0.4, *others)
    for line in (
        "3 ms, assumed: --host-ms",
        "20 (10 - 40) MB, assumed: --dense-mb",
        "0.07, assumed: --contention",
        "0.4, assumed: --late-weights",
        "1 GB/s, measured: nccl-tests",
        "0.7, assumed: --exponent",
        "  100,000, assumed: --rows",
        "ranks per node                        2, assumed",
    ):
        assert line in out


# -- a report, in which every rank's step takes 2 ms plus 30 us per item, and another 4 ms of the host

HISTORIES = np.minimum(LENGTHS, 200).reshape(30, 2, 8)


def _written(path: Path, *, fits: bool = True, hidden: bool = True, **changes: Any) -> Path:
    """Write the report of a run that cut its histories at 200, without known histories if it does not fit."""
    seconds = 0.002 + CostModel(linear=3e-5, quadratic=2e-8)(HISTORIES).sum(axis=2)
    parts = np.array([[step(0.1, forward=each, host_overhead=0.004) for each in ranks] for ranks in seconds])
    sums = sample_features(HISTORIES).sum(axis=2) if fits else None
    moved = {"dense gradients": 100_000, "dense gradients (behind backward, at most)": 1_000_000, "dense gradients 2": 10**9}
    moved = moved if hidden else {"dense gradients": 1_100_000}  # as with find_unused_parameters=True
    reduced = [ExchangeFigures(name, 1.0, 0.0, 0.0, 0.0, size, (1, 1)) for name, size in moved.items()]
    made = report_of(parts, np.full((30, 2), 8), features=sums, exchanges=reduced, **changes)
    path.write_text(json.dumps(made.document()))
    return path


KNOWN = {**WORKLOAD, "lengths": summarize_lengths(HISTORIES.ravel())}


def test_a_report_replaces_assumptions(simulated: Callable[..., str], tmp_path: Path) -> None:
    report = _written(tmp_path / "report.json", workload=KNOWN)
    out = simulated("--report", report, "--json", tmp_path / "found.json", alone=True)
    assert out.startswith("report.json: 480 samples; lengths: ") and "max 200, measured" in out and "of 8 histories" in out
    known = json.loads((tmp_path / "found.json").read_text())["known"]
    of_run = {"linear": 3e-5, "quadratic": 2e-8, "base": 0.002, "host": 0.004, "dense_bytes": 1.1e6, "batch_size": 8}
    for name, value in {**of_run, "last_bucket": 1e5, "rows": 4001, "row_bytes": 256}.items():
        assert (known[name]["word"], known[name]["source"]) == ("measured", "report.json"), name
        assert known[name]["value"] == pytest.approx(value, rel=0.15), name
        assert 0 <= known[name]["low"] <= known[name]["value"] <= known[name]["high"], name
    rate = Catalogue(4001, Quantity(known["exponent"]["value"], "measured")).collision_rate(1000)
    assert rate == pytest.approx(0.3, abs=0.01) and known["exponent"]["word"] == "measured"
    assert "32, assumed: --batch-size" in simulated("--report", report, "--batch-size", 32, alone=True)
    said = "report.json: the popularity of items stays an assumption, because the collision rate 0.990 (report.json) is not"
    for changes, told in (({"collision_rate": 0.99}, True), ({"lookups": None}, False)):  # earlier versions wrote no lookups
        out = simulated("--report", _written(report, workload={**KNOWN, **changes}), alone=True)
        assert (said in out) == told and "1.05 (0.8 - 1.2), assumed: popularity" in out


def test_a_report_of_a_plain_run(simulated: Callable[..., str], tmp_path: Path) -> None:
    """Take compute from the mean step, and leave out the dense gradients of tables, which are sharded in the prediction."""
    tables = {**TABLES, "reduced_bytes": 4_000_000, "gradient_bytes": 4_400_000}  # reduced every fourth step
    report = _written(tmp_path / "report.json", fits=False, workload={**KNOWN, "tables": tables, "lengths": None})
    assert f"{report} holds no history lengths. Pass --lengths" in simulated("--report", report, alone=True, fails=True)
    simulated("--report", report, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["known"]["dense_bytes"]["value"] == pytest.approx(1e5) and found["known"]["linear"]["word"] == "assumed"
    assert found["known"]["last_bucket"]["word"] == "assumed"
    simulated("--report", _written(report, hidden=False, workload=KNOWN), "--json", tmp_path / "found.json", alone=True)
    found = json.loads((tmp_path / "found.json").read_text())["known"]
    assert found["dense_bytes"]["value"] == pytest.approx(1.1e6) and found["last_bucket"]["word"] == "assumed"
    mean = 0.002 + CostModel(linear=3e-5, quadratic=2e-8)(HISTORIES).sum(axis=2).mean()
    # with the lengths of the run, the step of the prediction computes as long as that of the run
    report = _written(report, fits=False, workload=KNOWN)
    simulated("--report", report, "--json", tmp_path / "found.json", "--ranks", 2, "--steps", 32, "--draws", 0, alone=True)
    plain = json.loads((tmp_path / "found.json").read_text())["predicted"][0]
    assert plain["step"]["value"] / plain["limit"]["value"] == pytest.approx(mean, rel=0.1)


def test_lengths_of_another_run_are_refused(simulated: Callable[..., str], tmp_path: Path) -> None:
    report = _written(tmp_path / "report.json", workload=KNOWN)
    said = simulated("--report", report, fails=True)  # the file's lengths are not cut
    for fact in ("lengths.txt has mean", f"maximum {LENGTHS.max():g}", f"mean {HISTORIES.mean():.4g}", "--max-length 200"):
        assert fact in said
    assert "lengths.txt: 480 samples" in simulated("--report", report, "--max-length", 200)
    said = simulated("--report", report, "--max-length", 100, fails=True)
    assert "maximum 200. Leave out --lengths" in said, "a larger maximum would not help"
    assert "--max-length has no effect without --lengths" in simulated(
        "--report", report, "--max-length", 90, alone=True, fails=True
    )


def test_what_a_simulation_refuses(simulated: Callable[..., str], tmp_path: Path) -> None:
    missed = []
    (tmp_path / "broken.json").write_text("{")
    known = _written(tmp_path / "report.json", workload=KNOWN)
    for words, said in (
        (("--report", tmp_path / "broken.json"), "broken.json"),
        (("--report", known, "--max-length", 200, "--exponent", 1, "--attention", 0.4), "--attention"),
        (("--page", "page.html"), "--page has no effect without --compute-ms and --report"),
        (("--compute-ms", 1, "--padded"), "--padded has no effect with --compute-ms or --report"),
        (("--compute-ms", "fast"), "'fast'"),
        (("--compute-ms", "3:2:1"), "'3:2:1'"),
        (("--compute-ms", "1:2"), "'1:2'"),
        (("--compute-ms", "-1"), "-1"),
        (("--compute-ms", "0:1:2"), "--compute-ms: '0:1:2' is neither a number > 0"),
        (("--compute-ms", 1, "--attention", "0.5:1:2"), "--attention: '0.5:1:2' is neither a number from 0 to 1 nor"),
        (("--compute-ms", 1, "--ranks", "4,0"), "'0'"),
        (("--compute-ms", 1, "--steps", 1), "steps=1"),
        (("--compute-ms", 1, "--network", "none.json"), "none.json"),
    ):
        error = simulated(*words, fails=True)
        missed += [] if said in error else [(words, error)]
    assert missed == []
    for words, said in ((("--batch-size", 8), "--lengths FILE"), (("--lengths", tmp_path / "lengths.txt"), "--batch-size N")):
        for compute in ((), ("--compute-ms", 1)):
            assert said in simulated(*compute, *words, alone=True, fails=True)
