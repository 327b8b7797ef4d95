"""``python -m lightning_freescale.profile`` as a user types it, on scripts that know nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_freescale import BubbleProfiler
from lightning_freescale.callbacks.added_profiler import AddedProfiler
from lightning_freescale.command_line.main import main as freescale
from lightning_freescale.profile import VARIABLE
from lightning_freescale.profile.__main__ import main
from lightning_freescale.profiling.reporting.document import read

COMMAND = [sys.executable, "-m", "lightning_freescale.profile"]
MODEL = """
import os
import sys
import lightning as L
import torch

class Net(L.LightningModule):
    def __init__(self, dim: int = 4):
        super().__init__()
        self.layer = torch.nn.Linear(dim, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

QUIET = dict(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
"""
# what the script is told, and what it sees of itself
TRAIN = (
    "import sys; assert 'torch' not in sys.modules, 'it is imported already'\n"
    + MODEL
    + """
if __name__ == "__main__":
    devices, strategy = sys.argv[1:3]
    told = [sys.argv[1:], os.path.basename(__file__), sys.modules["__main__"].Net is Net, sys.path[0] == os.getcwd()]
    print(f"rank {os.environ.get('LOCAL_RANK', '0')} sees {told}", flush=True)
    L.Trainer(**QUIET, devices=int(devices), strategy=strategy).fit(Net())
"""
)
SEEN = "sees [['2', '{}'], 'train.py', True, True]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a script."""
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def _run(folder: Path, command: list[str], *words: Any) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    line = [*command, *map(str, words)]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def _script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that exits with 2; returns what it says."""

    def run(call: Callable[[list[str]], None], *words: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            call([*words])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return run


def test_ranks_that_lightning_starts_are_profiled(folder: Path) -> None:
    """Lightning starts rank 1 as ``python train.py 2 ddp``."""
    done = _run(folder, COMMAND, "--dirpath", "bubbles", "--label", "mine", "--warmup-steps", 2, "train.py", 2, "ddp")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [f"rank {rank} {SEEN.format('ddp')}" in done.stdout for rank in (0, 1)] == [True, True]
    document = read(folder / "bubbles" / "report.json")
    assert (document["run"]["world_size"], len(document["ranks"]), document["run"]["strategy"]) == (2, 2, "DDPStrategy")
    assert (document["run"]["label"], document["status"]["warmup"], document["status"]["steps"]) == ("mine", 2, 6)
    assert {path.name for path in (folder / "bubbles").iterdir()} == {"report.json", "report.html", "trace.json"}
    assert "Verdict:" in done.stdout
    assert {path.name for path in folder.iterdir()} == {"train.py", "bubbles"}, "nothing else is left"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "words", "strategy"),
    [
        ([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", *COMMAND[2:]], ["train.py"], "ddp"),
        (COMMAND, ["train.py"], "ddp_spawn"),
        (COMMAND, ["-m", "train"], "ddp"),
        ([*COMMAND[:2], "lightning_freescale", "profile", "run"], ["train.py"], "freescale"),
    ],
    ids=["torchrun", "spawned", "a module", "freescale profile run"],
)
def test_any_launcher(folder: Path, launcher: list[str], words: list[str], strategy: str) -> None:
    (folder / "train.py").write_text("import lightning_freescale\n" * (strategy == "freescale") + MODEL + TRAIN.split(MODEL)[1])
    done = _run(folder, launcher, "--dirpath", "bubbles", *words, 2, strategy)
    assert done.returncode == 0, done.stderr[-3000:]
    assert SEEN.format(strategy) in done.stdout
    assert len(read(folder / "bubbles" / "report.json")["ranks"]) == 2


@pytest.mark.slow
def test_every_trainer_is_profiled_and_the_scripts_own_profiler_stays(folder: Path) -> None:
    """Each Trainer has a folder of its own; a list of callbacks may be given to two of them."""
    script = _script(
        folder,
        MODEL
        + """
from lightning_freescale import BubbleProfiler
shared = [L.Callback()]
for callbacks in (shared, [BubbleProfiler("own", verbose=False)], shared):
    trainer = L.Trainer(**QUIET, devices=1, callbacks=callbacks)
    trainer.fit(Net())
    print([type(callback).__name__ for callback in trainer.callbacks])
""",
    )
    done = _run(folder, COMMAND, "--every-n-steps", 4, "--live", "--hang-timeout", 30, script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "bubble: " in done.stderr, "there is no bar to stand beside"
    assert {path.parent.name for path in folder.glob("*/report.json")} == {"bubbles", "own", "bubbles_3"}
    assert done.stdout.count("['Callback', 'BubbleProfiler', 'AddedProfiler']") == 2, done.stdout
    assert done.stderr.count("the script's own BubbleProfiler profiles this fit") == 1


def test_each_fit_of_a_trainer_has_a_folder(folder: Path) -> None:
    fits = "trainer = L.Trainer(**QUIET, devices=1)\nfor epochs in (1, 3):\n    trainer.fit_loop.max_epochs = epochs\n"
    done = _run(folder, COMMAND, "--warmup-steps", 0, _script(folder, MODEL + f"{fits}    trainer.fit(Net())\n"))
    assert done.returncode == 0, done.stderr[-3000:]
    steps = {path.parent.name: read(path)["status"]["steps"] for path in folder.glob("*/report.json")}
    assert steps == {"bubbles": 16, "bubbles_2": 32}
    assert done.stdout.count("Verdict:") == 2


@pytest.mark.slow
@pytest.mark.parametrize("profiled_by", ["the command", "the command line of the script"])
def test_a_script_with_lightnings_command_line(folder: Path, profiled_by: str) -> None:
    script = _script(folder, MODEL + "\nfrom lightning.pytorch.cli import LightningCLI\nLightningCLI(Net)\n")
    told = ["fit", "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_epochs=1"]
    if profiled_by == "the command":
        done = _run(folder, COMMAND, "--dirpath=bubbles", script, *told)
    else:
        callback = ["--trainer.callbacks+=lightning_freescale.BubbleProfiler", "--trainer.callbacks.dirpath=bubbles"]
        done = _run(folder, [sys.executable], script, *told, *callback, "--trainer.callbacks.every_n_steps=4")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(read(folder / "bubbles" / "report.json")["ranks"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no disk')", 1, "no disk"),
        ("sys.exit()", 0, ""),
    ],
)
def test_it_ends_as_the_script_does(folder: Path, end: str, code: int, said: str) -> None:
    script = _script(folder, MODEL + f"\nL.Trainer(**QUIET, devices=1).fit(Net())\n{end}\n")
    done = _run(folder, COMMAND, script)
    assert done.returncode == code, done.stderr[-3000:]
    assert said in done.stderr
    assert f'script.py", line {(folder / script).read_text().count(chr(10))}' in done.stderr or not said.startswith("KeyError")
    assert (folder / "bubbles" / "report.json").exists()


@pytest.mark.slow
def test_a_script_that_stops_itself_inside_a_fit_is_reported(folder: Path) -> None:
    stop = "class Stop(L.Callback):\n    def on_train_batch_end(self, trainer, *rest):\n        "
    stop += "if trainer.global_step == 9: raise ValueError('inside')\n"
    script = _script(folder, MODEL + stop + "L.Trainer(**QUIET, devices=1, callbacks=[Stop()]).fit(Net())\n")
    done = _run(folder, COMMAND, script)
    assert done.returncode == 1 and "ValueError: inside" in done.stderr
    assert read(folder / "bubbles" / "report.json")["status"]["reason"] == "ValueError: inside"


def test_a_script_that_never_fits_is_told(folder: Path) -> None:
    done = _run(folder, COMMAND, _script(folder, "import sys\nprint('ended', sys.argv[1:])\n"), "--dirpath", "mine")
    assert done.returncode == 2
    assert "script.py has ended, and nothing was profiled, because no Trainer of lightning.pytorch" in done.stderr
    assert done.stdout == "ended ['--dirpath', 'mine']\n", "what stands behind the script is the script's"
    assert _run(folder, COMMAND, _script(folder, "raise SystemExit(3)")).returncode == 3


def test_the_flags_of_the_interpreter_hold_for_the_script(folder: Path) -> None:
    script = _script(folder, "import sys\nprint(sys.flags.optimize, sys.warnoptions, sys._xoptions)\n")
    flags = ["-O", "-W", "ignore::ImportWarning", "-X", "utf8"]
    plain = _run(folder, [sys.executable, *flags], script).stdout
    assert plain == "1 ['ignore::ImportWarning'] {'utf8': True}\n"
    assert _run(folder, [sys.executable, *flags, *COMMAND[1:]], script).stdout == plain


def test_a_package_is_imported_once(folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("print('imported')\n")
    (folder / "pkg" / "train.py").write_text("print('run', __name__, __package__)\n")
    assert _run(folder, COMMAND, "-m", "pkg.train").stdout == "imported\nrun __main__ pkg\n"
    missing = _run(folder, COMMAND, "-m", "pkg.none")
    assert missing.returncode == 1 and "No module named pkg.none" in missing.stderr


def test_a_script_sees_of_itself_what_it_sees_under_python(folder: Path) -> None:
    shown = "sys.argv, __file__, __name__, __spec__, sys.path[0], sys.modules['__main__'].Mine is Mine, f.__annotations__"
    (folder / "inside").mkdir()
    (folder / "inside" / "train.py").write_text(f"import sys\nclass Mine: pass\ndef f(x: 1): pass\nprint({shown})\n")
    plain = _run(folder, [sys.executable], "inside/train.py", 1)
    profiled = _run(folder, COMMAND, "inside/train.py", 1)
    assert profiled.stdout == plain.stdout and "'inside/train.py', '1'" in plain.stdout and "{'x': 1}" in plain.stdout
    assert "nothing was profiled" in profiled.stderr


@pytest.mark.slow
def test_the_trainer_of_the_other_package_is_refused(folder: Path) -> None:
    """Its callbacks are of other classes."""
    done = _run(folder, COMMAND, _script(folder, "import pytorch_lightning as pl\npl.Trainer(accelerator='cpu')\n"))
    assert done.returncode == 1
    assert "import lightning.pytorch as pl, and nothing of pytorch_lightning" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.py"], "there is no file 'none.py': pass the script"),
        (["-m", "no_such_module"], "-m no_such_module: there is no such module"),
        (["-m", "no_such.module"], "-m no_such.module: there is no such module"),
        (["--max-steps", "0", "train.py"], "max_steps=0: pass a whole number, 1 or more"),
        (["--dirpath", "bubbles"], "the following arguments are required: train.py"),
    ],
)
def test_what_cannot_be_run_is_told(
    words: list[str], said: str, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert said in fails(main, *words)
    assert said in fails(freescale, "profile", "run", *words)


def test_an_installation_without_the_entry_point_is_told(
    folder: Path, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_freescale.profile.__main__._HOOK", "nobody.asks")
    assert "pip install -e ." in fails(main, str(folder / "train.py"))


def test_other_trainers_get_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def added() -> list[str]:
        callbacks = L.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path).callbacks
        return [type(callback).__name__ for callback in callbacks if isinstance(callback, (AddedProfiler, BubbleProfiler))]

    assert added() == []
    monkeypatch.setenv(VARIABLE, json.dumps({"options": {}, "fits": str(tmp_path / "fits")}))
    assert added() == ["AddedProfiler"], "Lightning asks for it"
