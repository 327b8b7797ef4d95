"""Time from the death of a rank to the first new step, under torchrun with ``--max-restarts``.

A training with ``--megabytes`` of embedding tables saves a checkpoint. The last rank then kills itself with SIGKILL. torchrun
starts all ranks again, and they continue from the checkpoint. Each stage ends when the slowest rank has completed it:

end        torchrun has stopped the other ranks, and has started the new processes
imports    the new processes have imported torch, Lightning, TorchRec and this package
model      the user's module exists, with its tables in host memory
group      the default process group exists
tables     the tables are planned and sharded
load       the checkpoint is loaded
step       the first step is done

For comparison, the launcher alone restarts a script that only imports torch and creates the process group. ``beyond`` is the
difference between the two times.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parent))

import harness

STAGES = ("end", "imports", "model", "group", "tables", "load", "step")
KINDS = ("single", "sharded")
DIM, TABLES, SAVED_AT, KILLED_AT = 64, 4, 4, 6


def main() -> None:
    options = _options()
    if options.rank_options:
        _rank(json.loads(options.rank_options))
        return
    figures: dict[str, float] = {}
    # pip compiles what it installs; PYTHONDONTWRITEBYTECODE would let every rank compile a checkout again
    compileall.compile_dir(str(Path(__file__).parent.parent / "lightning_freescale"), quiet=1)
    print(f"{options.megabytes} MB of tables; seconds from the death of a rank, median of {options.rounds}")
    for ranks in options.ranks:
        alone = median(sum(_recover(ranks, bare=True).values()) for _ in range(options.rounds))
        figures[f"launcher_{ranks}_s"] = alone
        for kind in options.kinds:
            rounds = [_recover(ranks, kind=kind, megabytes=options.megabytes) for _ in range(options.rounds)]
            name = f"{kind}_{ranks}"
            figures |= {f"{name}_{stage}_s": median(found[stage] for found in rounds) for stage in STAGES}
            figures[f"{name}_s"] = median(sum(found.values()) for found in rounds)
            figures[f"{name}_beyond_s"] = figures[f"{name}_s"] - alone
            stages = ", ".join(f"{stage} {figures[f'{name}_{stage}_s']:.1f}" for stage in STAGES)
            print(
                f"{ranks} ranks, {kind:>7}: {figures[f'{name}_s']:.1f} ({stages}); the launcher alone {alone:.1f}, "
                f"beyond it {figures[f'{name}_beyond_s']:.1f}",
                flush=True,
            )
    figures["most_beyond_s"] = max(value for name, value in figures.items() if name.endswith("_beyond_s"))
    harness.finish(figures, options)


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--megabytes", type=int, default=400, help="size of all tables (default: 400)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="formats of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank-options", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _recover(ranks: int, **given: Any) -> dict[str, float]:
    """Return the seconds of each stage of a restart."""
    folder = Path(tempfile.mkdtemp())
    try:
        of_rank = json.dumps({"folder": str(folder), "ranks": ranks, **given})
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1"]
        command = [sys.executable, *launcher, __file__, "--rank-options", of_rank]
        # without it, torch finds the addresses of the first attempt, unless the strategy creates the group
        own = {"OMP_NUM_THREADS": "1"} | ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if "bare" in given else {})
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | own)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    finally:
        shutil.rmtree(folder)
    at = dict[str, float]()
    for event in events:
        at[event["name"]] = max(event["at"], at.get(event["name"], 0.0))
    stages = ["killed", *(name for name in STAGES if name in at)]
    return {stage: at[stage] - at[before] for before, stage in zip(stages, stages[1:])}


def _note(folder: str, name: str, at: float | None = None) -> None:
    """Append the end of a stage to the file of the run: of the restarted processes, or the death."""
    if name == "killed" or os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        with open(Path(folder) / "events", "a") as file:
            file.write(json.dumps({"name": name, "at": at or time.time()}) + "\n")


def _started() -> float:
    """Return the time at which this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _rank(given: dict[str, Any]) -> None:
    _note(given["folder"], "end", _started())
    (_bare if given.get("bare") else _train)(given)


def _die(given: dict[str, Any]) -> None:
    """Kill the last rank of the first attempt."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and int(os.environ["RANK"]) == given["ranks"] - 1:
        _note(given["folder"], "killed")
        os.kill(os.getpid(), signal.SIGKILL)


def _bare(given: dict[str, Any]) -> None:
    import torch.distributed as dist

    _note(given["folder"], "imports")
    dist.init_process_group("gloo")
    dist.barrier()
    _note(given["folder"], "group")
    _die(given)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(60)  # torchrun ends this process
    dist.destroy_process_group()


def _train(given: dict[str, Any]) -> None:
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy

    _note(given["folder"], "imports")
    torch.set_num_threads(1)
    rows = (given["megabytes"] << 20) // (4 * DIM * TABLES)
    names = [f"table{number}" for number in range(TABLES)]

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            of_table = {"num_embeddings": rows, "embedding_dim": DIM}
            tables = [EmbeddingConfig(name=name, feature_names=[name], **of_table) for name in names]
            self.items = EmbeddingCollection(tables=tables)
            self.head = nn.Linear(DIM, 1, bias=False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rows_of = self.items(batch)
            return sum(self.head(rows_of[name].values()).square().mean() for name in names)

        def configure_optimizers(self) -> Any:
            return RowWiseAdagrad(self.parameters(), lr=0.1)

    class Notes(L.Callback):
        def __init__(self) -> None:
            for hook, stage in (("setup", "group"), ("on_fit_start", "tables"), ("on_train_start", "load")):
                setattr(self, hook, lambda *args, name=stage, **kwargs: _note(given["folder"], name))

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == SAVED_AT + 1:
                _note(given["folder"], "step")
            if trainer.global_step == KILLED_AT:
                _die(given)

    def collate(samples: list[Any]) -> Any:
        lengths = torch.ones(TABLES * len(samples), dtype=torch.int32)
        return KeyedJaggedTensor(keys=names, values=torch.randint(0, rows, (TABLES * len(samples),)), lengths=lengths)

    saving = ModelCheckpoint(Path(given["folder"]) / "checkpoints", every_n_train_steps=SAVED_AT, save_last=True)
    data = FreeScaleDataModule(range(8 * given["ranks"] * 64), torch.ones(8 * given["ranks"] * 64), 64, collate_fn=collate)
    trainer = L.Trainer(
        strategy=FreeScaleStrategy(checkpoint=given["kind"]), accelerator="cpu", devices=given["ranks"], max_epochs=1,
        logger=False, callbacks=[saving, Notes()], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Model()
    _note(given["folder"], "model")
    trainer.fit(module, data, ckpt_path="last")


if __name__ == "__main__":
    main()
