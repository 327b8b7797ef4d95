"""Tests of ``freescale profile run`` on scripts without a profiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_freescale import BubbleProfiler
from lightning_freescale.callbacks.bubble_profiler import AddedProfiler
from lightning_freescale.command_line.main import main
from lightning_freescale.command_line.profiled_script import VARIABLE
from lightning_freescale.profiling.reporting.document import read

COMMAND = [sys.executable, "-m", "lightning_freescale", "profile", "run"]
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
# prints the arguments of the script and how it was started
TRAIN = (
    "import sys; assert 'torch' not in sys.modules, 'it is imported already'\n"
    + MODEL
    + """
if __name__ == "__main__":
    devices, strategy = sys.argv[1:3]
    seen = [sys.argv[1:], os.path.basename(__file__), sys.modules["__main__"].Net is Net, sys.path[0] == os.getcwd()]
    print(f"rank {os.environ.get('LOCAL_RANK', '0')} sees {seen}", flush=True)
    L.Trainer(**QUIET, devices=int(devices), strategy=strategy).fit(Net())
"""
)
SEEN = "sees [['2', '{}'], 'train.py', True, True]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a script."""
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def _run(folder: Path, command: list[str], *words: Any, code: int = 0) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    line = [*command, *map(str, words)]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr[-3000:]
    return done


@pytest.fixture
def profile(folder: Path, monkeypatch: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command in this process until it would start the script, which runs in a subprocess."""

    def run(*words: Any, code: int = 0) -> subprocess.CompletedProcess[str]:
        started: list[list[str]] = []
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.setenv(VARIABLE, "")  # and so it is unset afterwards
            patch.setattr(sys, "path", [*sys.path])
            patch.setattr(tempfile, "tempdir", str(folder))
            patch.setattr(os, "execv", lambda path, command: started.append(command))
            main(["profile", "run", *map(str, words)])
            return _run(folder, *started, code=code)

    return run


def _script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def test_ranks_that_lightning_starts_are_profiled(folder: Path) -> None:
    """Profile rank 1, which Lightning starts as ``python train.py 2 ddp``."""
    done = _run(folder, COMMAND, "--dirpath", "mine", "train.py", 2, "ddp")
    assert [f"rank {rank} {SEEN.format('ddp')}" in done.stdout for rank in (0, 1)] == [True, True]
    document = read(folder / "mine" / "report.json")
    assert (document["run"]["world_size"], len(document["ranks"]), document["run"]["strategy"]) == (2, 2, "DDPStrategy")
    assert (document["run"]["label"], document["status"]["warmup"], document["status"]["steps"]) == ("mine", 5, 3)
    assert {path.name for path in (folder / "mine").iterdir()} == {"report.json", "report.html", "trace.json"}
    assert "Verdict:" in done.stdout
    assert {path.name for path in folder.iterdir()} == {"train.py", "mine"}, "nothing else is left"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "words", "strategy"),
    [
        ([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", *COMMAND[2:]], ["train.py"], "ddp"),
        (COMMAND, ["train.py"], "ddp_spawn"),
        (COMMAND, ["-m", "train"], "freescale"),
    ],
    ids=["torchrun", "spawned", "a module"],
)
def test_any_launcher(folder: Path, launcher: list[str], words: list[str], strategy: str) -> None:
    (folder / "train.py").write_text("import lightning_freescale\n" * (strategy == "freescale") + MODEL + TRAIN.split(MODEL)[1])
    done = _run(folder, launcher, "--dirpath", "bubbles", *words, 2, strategy)
    assert SEEN.format(strategy) in done.stdout
    assert len(read(folder / "bubbles" / "report.json")["ranks"]) == 2


def test_every_fit_of_every_trainer_is_profiled_and_the_scripts_own_profiler_stays(folder: Path, profile: Any) -> None:
    """Write each fit to a separate folder, also when two Trainers share a list of callbacks."""
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
trainer.fit_loop.max_epochs = 3
trainer.fit(Net())
""",
    )
    done = profile("--every-n-steps", 4, script)
    steps = {path.parent.name: read(path)["status"]["steps"] for path in folder.glob("*/report.json")}
    assert steps == {"bubbles": 11, "own": 11, "bubbles_3": 11, "bubbles_4": 27}
    assert done.stdout.count("['Callback', 'BubbleProfiler', 'AddedProfiler']") == 2, done.stdout
    assert done.stderr.count("own BubbleProfiler") == 1 and done.stdout.count("Verdict:") == 3


def test_it_ends_as_the_script_does(folder: Path, profile: Any) -> None:
    """Exit with the status of a script that adds a line to the file of fits itself."""
    fits = f"import json, os, sys\nopen(json.loads(os.environ[{VARIABLE!r}])['fits'], 'a').write('0\\n')\n"
    ends = (("raise KeyError('mine')", 1, "KeyError: 'mine'"), ("sys.exit(7)", 7, ""), ("sys.exit('no disk')", 1, "no disk"))
    for end, code, said in (*ends, ("sys.exit()", 0, ""), ("pass", 0, "")):
        error = profile(_script(folder, fits + end + "\n"), code=code).stderr
        assert said in error and ('script.py", line 3' in error) == said.startswith("KeyError"), end
    done = profile(_script(folder, "import sys\nprint('ended', sys.argv[1:])\n"), "--dirpath", "mine", code=2)
    assert "script.py" in done.stderr and "nothing was profiled" in done.stderr
    assert done.stdout == "ended ['--dirpath', 'mine']\n", "words after the script are arguments of the script"
    assert {path.name for path in folder.iterdir()} == {"train.py", "script.py"}, "nothing else is left"


@pytest.mark.slow
def test_the_flags_of_the_interpreter_hold_for_the_script(folder: Path) -> None:
    script = _script(folder, "import sys\nprint(sys.flags.optimize, sys.warnoptions, sys._xoptions)\nsys.exit(3)\n")
    flags = ["-O", "-W", "ignore::ImportWarning", "-X", "utf8"]
    plain = _run(folder, [sys.executable, *flags], script, code=3).stdout
    assert plain == "1 ['ignore::ImportWarning'] {'utf8': True}\n"
    assert _run(folder, [sys.executable, *flags, *COMMAND[1:]], script, code=3).stdout == plain


def test_a_script_or_a_package_sees_of_itself_what_it_sees_under_python(folder: Path, profile: Any) -> None:
    shown = "sys.argv, __file__, __name__, __spec__, sys.path[0], sys.modules['__main__'].Mine is Mine, f.__annotations__"
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("print('imported')\n")
    (folder / "pkg" / "train.py").write_text(f"import sys\nclass Mine: pass\ndef f(x: 1): pass\nprint(__package__, {shown})\n")
    plain = _run(folder, [sys.executable], "pkg/train.py", 1).stdout
    assert profile("pkg/train.py", 1, code=2).stdout == plain and "'pkg/train.py', '1'" in plain and "{'x': 1}" in plain
    as_module = profile("-m", "pkg.train", code=2).stdout
    assert as_module.startswith("imported\npkg ") and as_module.count("imported") == 1 and " __main__ " in as_module
    assert "pkg.none" in profile("-m", "pkg.none", code=1).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.py"], "'none.py'"),
        (["-m", "no_such_module"], "-m no_such_module: "),
        (["-m", "no_such.module"], "-m no_such.module: "),
        (["--every-n-steps", "0", "train.py"], "every_n_steps=0"),
        (["--dirpath", "bubbles"], "required: train.py"),
    ],
)
def test_what_cannot_be_run_is_reported(
    words: list[str], said: str, fails: Callable[..., str], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert said in fails("profile", "run", *words)


def test_an_installation_without_the_entry_point_is_reported(folder: Path, fails: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("lightning_freescale.command_line.profile._HOOK", "no.such_group")
    assert "pip install -e ." in fails("profile", "run", str(folder / "train.py"))


def test_other_trainers_get_nothing(monkeypatch: Any, tmp_path: Path) -> None:
    def added() -> list[str]:
        callbacks = L.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path).callbacks
        return [type(callback).__name__ for callback in callbacks if isinstance(callback, (AddedProfiler, BubbleProfiler))]

    import pytorch_lightning as pl  # its callbacks have other base classes

    assert added() == []
    pl.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    monkeypatch.setenv(VARIABLE, json.dumps({"options": {}, "fits": str(tmp_path / "fits")}))
    assert added() == ["AddedProfiler"], "Lightning asks for it"
    with pytest.raises(ValueError, match="pytorch_lightning"):
        pl.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
