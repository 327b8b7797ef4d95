"""Ranks that others start: torchrun, also on two hosts and after ranks have died, SLURM, and a notebook."""

from __future__ import annotations

import io
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities import imports
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.testing import _reserved_port, run_distributed
from tests.docs.pages import DOCS, ROOT, save_files
from tests.helpers.recommender import REPEATS, Recommender, Samples, collate, trainer
from tests.strategy.test_sigterm import Evicted

sys.path.append(str(ROOT / "benchmarks"))

import netlab


def _run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    common = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=os.environ | common | environment, capture_output=True, text=True, timeout=280
    )


# -- jobs that are started again


class Dies(Recommender):
    """Takes a while for each step, and kills its rank, given by attempt, at some step."""

    def __init__(self, deaths: dict[int, tuple[int, int]], seconds: float) -> None:
        super().__init__("adagrad")
        self.deaths, self.seconds, self.dropout = deaths, seconds, 0.2

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        Path(f"at{self.global_rank}").write_text(str(self.global_step))
        if not self.losses and self.global_rank == 0:
            print("attempt", attempt, "begins at step", self.global_step, flush=True)
        if self.deaths.get(attempt) == (self.global_rank, self.global_step):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)


def train(deaths: dict[int, tuple[int, int]], seconds: float = 0.0, folder: Path = Path()) -> int:
    """Train from the last checkpoint on, and return the number of steps."""
    os.chdir(folder)
    L.seed_everything(0, verbose=False)
    samples = Samples(160)
    callbacks = [ModelCheckpoint("checkpoints", every_n_train_steps=3, save_last=True)]
    fitting = trainer(devices=2, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
    data = FreeScaleDataModule(samples, samples.lengths, 4, collate_fn=collate, **REPEATS)
    module = Dies(deaths, seconds)
    fitting.fit(module, data, ckpt_path="last")
    fitting.save_checkpoint("end.ckpt")
    return len(module.losses)


def _assert_as_undisturbed(folder: Path) -> None:
    """Assert that the run is bitwise equal to one in which no rank dies."""
    other = folder / "undisturbed"
    other.mkdir()
    run_distributed(train, 2, {}, folder=other)
    ends = []
    for path in (folder, other):
        saved: dict[str, Any] = torch.load(path / "end.ckpt", weights_only=True)
        states = [state for optimizer in saved["optimizer_states"] for state in optimizer["state"].values()]
        ends.append([*saved["state_dict"].values(), *(value for state in states for value in state.values())])
    assert len(ends[0]) == len(ends[1]) > 6
    assert all(torch.equal(one, other) for one, other in zip(*ends))


def _write_script(folder: Path, *arguments: Any) -> None:
    call = f"train({', '.join(map(repr, arguments))})"
    (folder / "train.py").write_text(f"from tests.strategy.test_launch import train\n\n{call}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rendezvous", "deaths", "begins"), [("c10d", {0: (1, 1), 1: (0, 28)}, [0, 0, 27]), ("static", {0: (0, 5)}, [0, 3])]
)
def test_torchrun_starts_ranks_that_die_again(
    tmp_path: Path, rendezvous: str, deaths: dict[int, tuple[int, int]], begins: list[int]
) -> None:
    _write_script(tmp_path, deaths)
    with _reserved_port() as port:
        options = ("--standalone",) if rendezvous == "c10d" else ("--master-port", str(port))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
        done = _run([*torchrun, *options, "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    begun = [line for line in done.stdout.splitlines() if line.startswith("attempt")]
    assert begun == [f"attempt {attempt} begins at step {step}" for attempt, step in enumerate(begins)]
    _assert_as_undisturbed(tmp_path)


def _srun(folder: Path, port: int) -> list[subprocess.Popen[str]]:
    """Start two tasks of a job on one node, with the variables that srun sets and an scontrol of ours."""
    (folder / "at1").unlink(missing_ok=True)
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {folder}/requeued\n')
    (folder / "scontrol").chmod(0o755)
    common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    common |= {"SLURM_JOB_ID": "4242", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    common |= {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=folder,
            env=os.environ | common | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for task in range(2)
    ]


def _ended(tasks: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [task.communicate(timeout=120)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "step"), [({1: signal.SIGKILL}, 10), ({0: signal.SIGUSR1, 1: signal.SIGUSR1}, 7), ({1: signal.SIGUSR1}, 23)]
)
def test_a_job_of_slurm_that_is_started_again_goes_on(tmp_path: Path, signals: dict[int, signal.Signals], step: int) -> None:
    """After a rank has died, which ends the other; after SLURM's signal, which finds the ranks at different places."""
    _write_script(tmp_path, {}, 0.02)
    with _reserved_port() as port:
        tasks = _srun(tmp_path, port)
        while not (tmp_path / "at1").exists() or int((tmp_path / "at1").read_text() or 0) < step:
            assert all(task.poll() is None for task in tasks), _ended(tasks)
            time.sleep(0.01)
        for task, number in signals.items():
            tasks[task].send_signal(number)
            time.sleep(0.05)
        printed = _ended(tasks)
    assert not (tmp_path / "end.ckpt").exists(), printed
    if signal.SIGUSR1 in signals.values():
        assert [path.name for path in tmp_path.glob("hpc_ckpt*")] == ["hpc_ckpt_1.ckpt"]
        assert (tmp_path / "requeued").read_text() == "requeue 4242\n"
    else:
        assert tasks[0].returncode == 1
    first, second = run_distributed(train, 2, {}, folder=tmp_path)
    assert first == second < 40
    _assert_as_undisturbed(tmp_path)


# -- jobs that are preempted


def evicted(launcher: bool = False) -> None:
    """Train until rank 1, or its launcher, receives SIGTERM, and write the exit status of each rank to a file."""
    # rank 0 needs more time for its end than Lightning grants after a process that it has started has ended
    late = LambdaCallback(on_exception=lambda fitting, *_: time.sleep(0 if fitting.global_rank else 7))
    samples, fitting, module = Samples(64), trainer(devices=2, callbacks=[late]), Evicted([1])
    if launcher:
        module.act = lambda: os.kill(os.getppid(), signal.SIGTERM)
    try:
        fitting.fit(module, FreeScaleDataModule(samples, samples.lengths, 4, collate_fn=collate))
    except SystemExit as stopped:
        Path(f"status{fitting.global_rank}").write_text(str(stopped.code))
        raise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "to_launcher", "status"),
    [(None, False, 143), ([], False, 1), ([], True, 1), (["--max-restarts", "3"], True, 1)],  # torchrun has a status of its own
)
def test_ranks_that_are_preempted_end_with_143(
    options: list[str] | None, to_launcher: bool, status: int, tmp_path: Path
) -> None:
    """Start the ranks with torchrun if there are ``options`` for it."""
    (tmp_path / "train.py").write_text(f"from tests.strategy.test_launch import evicted\n\nevicted({to_launcher})\n")
    torchrun = [] if options is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    done = _run([sys.executable, *torchrun, "train.py"], tmp_path)
    assert [(tmp_path / f"status{rank}").read_text() for rank in range(2)] == ["143", "143"], done.stderr[-3000:]
    assert done.returncode == status
    assert re.search(r"rank \d received SIGTERM: all ranks stop here", done.stderr)


# -- two hosts

# Lightning and torchrun would take the lab's ranks for theirs; hosts of the lab share a name, so is_host says which is first
ON_HOST = """
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE
rendezvous="--rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT --rdzv-conf is_host=$((NETLAB_HOST == 0))"
exec torchrun --nnodes 2 --nproc-per-node 2 $rendezvous --local-addr 10.77.0.$((NETLAB_HOST + 1)) train.py
"""


def _loss(output: str, nodes: int) -> float:
    found = re.search(r"ranks: 4 on (\d) node\(s\); loss: (\S+)", output)
    assert found and int(found[1]) == nodes, output[-3000:]
    return float(found[2])


def _output(script: Path) -> str:
    sys.path.insert(0, str(script.parent))
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(script), run_name="__main__")
    return output.getvalue()


@pytest.mark.slow
@pytest.mark.skipif(netlab.available() is not None, reason="netlab cannot run here")
def test_torchrun_on_two_hosts_trains_as_on_one(tmp_path: Path) -> None:
    """Run the script of the page on launching, in the folder where a reader would save it."""
    for page in (DOCS / "quick_start.md", DOCS / "how_to" / "launch.md"):
        save_files(page, tmp_path)
    lab = [sys.executable, netlab.__file__, "--hosts", "2", "--rate", "none", "--timeout", "150", "--", "bash", "-ec", ON_HOST]
    done = _run(lab, tmp_path)
    two = _loss(done.stdout + done.stderr, nodes=2)
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("devices=2", "devices=4"))
    one = _loss(run_distributed(_output, 4, script, init=False)[0], nodes=1)
    assert two == pytest.approx(one, rel=1e-6)


# -- a notebook


@pytest.fixture
def interactive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning takes this process for a notebook."""
    for module in (imports, accelerator_connector):
        monkeypatch.setattr(module, "_IS_INTERACTIVE", True)


def _fit(devices: int, alone: bool = False) -> tuple[int, int]:
    if alone:  # no launcher has set these
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
            del os.environ[name]
    samples, fitting = Samples(32), trainer(devices=devices)
    fitting.fit(Recommender(), FreeScaleDataModule(samples, samples.lengths, 4, collate_fn=collate))
    return fitting.world_size, fitting.global_step


@pytest.mark.usefixtures("interactive")
def test_a_notebook_trains_on_one_rank_and_on_ranks_that_it_has_started() -> None:
    assert run_distributed(_fit, 1, 1, alone=True, init=False) == [(1, 8)]
    assert run_distributed(_fit, 2, 2, init=False) == [(2, 4)] * 2
    with pytest.raises(RuntimeError, match=r"2 ranks .*notebook.*%%writefile"):
        _fit(2)
