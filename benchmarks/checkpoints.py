"""Costs of saving and loading a checkpoint: memory beyond that of training, and the delay of a step.

A table of ``--megabytes`` is sharded over ``--ranks`` processes with gloo on CPU. Memory is the private memory of a process
(RssAnon). Pages of mapped files are reported separately, because the system can reclaim them.

``--flips N`` instead changes one random byte N times in a file and in a folder, reads them, and counts the results:

damaged          an error said that the checkpoint is damaged or incomplete
unchanged        the contents were the same, for example after a change between two records
wrong            other contents were read
other_errors     another error was raised
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).parent))

import harness
from checkpoint_contents import alter, digest

KINDS = ("single", "sharded", "async")
DIM = 64
MEGABYTE = 1 << 20


def main() -> None:
    options = _options()
    if options.rank_options:
        _rank(json.loads(options.rank_options))
        return
    if options.flips:
        harness.finish(_flip_bytes(options), options)
        return
    shard = options.megabytes / options.ranks
    figures: dict[str, float] = {}
    print(f"a table of {options.megabytes} MB on {options.ranks} ranks, {shard:g} MB each; MB beyond those of training")
    for kind in options.kinds:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            saved = _run(options, kind=kind, path=str(folder / "a.ckpt"), load=False)
            loaded = _run(options, kind=kind, path=str(folder / "a.ckpt"), load=True)
            figures[f"{kind}_consolidate_tables"] = _consolidate(folder) / options.megabytes
        finally:
            shutil.rmtree(folder)
        for name, of_ranks in (("save", saved), ("load", loaded)):
            peaks = [rank[f"{name}_mb"] for rank in of_ranks]
            figures[f"{kind}_{name}_rank0_shards"] = peaks[0] / shard
            figures[f"{kind}_{name}_others_shards"] = max(peaks[1:], default=0.0) / shard
            figures |= {f"{kind}_{name}_mb_{rank}": peak for rank, peak in enumerate(peaks)}
        figures |= {f"{kind}_mapped_mb_{number}": rank["mapped_mb"] for number, rank in enumerate(loaded)}
        waits, whole = (max(rank[name] for rank in saved) for name in ("save_s", "whole_s"))
        until = max(rank["load_s"] for rank in loaded)
        figures |= {f"{kind}_save_s": waits, f"{kind}_whole_s": whole, f"{kind}_load_s": until}
        figures[f"{kind}_wait_per_copy"] = waits / max(rank["copy_s"] for rank in saved)
        print(
            f"{kind:>8}: save {_each(saved, 'save_mb')} MB, a step waits {waits:.2f} s "
            f"({figures[f'{kind}_wait_per_copy']:.2f} times the copy to memory), whole after "
            f"{whole:.2f} s; load {_each(loaded, 'load_mb')} MB, mapped {_each(loaded, 'mapped_mb')} MB, {until:.2f} s; "
            f"consolidate {figures[f'{kind}_consolidate_tables'] * options.megabytes:.0f} MB"
        )
    harness.finish(figures, options)


def _each(ranks: list[dict[str, float]], name: str) -> str:
    return " ".join(f"{rank[name]:.0f}" for rank in ranks)


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=2000, help="size of the table (default: 2000)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--folder", type=Path, default=None, help="folder of the checkpoints (default: a temporary one)")
    parser.add_argument("--flips", type=int, default=0, help="changes of a random byte per format, instead of costs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the changes")
    parser.add_argument("--rank-options", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(options: argparse.Namespace, **of_rank: Any) -> list[dict[str, float]]:
    """Return the measurements of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(options.ranks):
        environment = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(options.ranks), "LOCAL_WORLD_SIZE": str(options.ranks), "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "checkpoints", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        given = json.dumps({**of_rank, "megabytes": options.megabytes, "ranks": options.ranks})
        command = [sys.executable, __file__, "--rank-options", given]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    ended = [process.communicate() for process in processes]
    for process, (_, error) in zip(processes, ended):
        if process.returncode:
            raise SystemExit(error[-3000:])
    return [json.loads(output.strip().splitlines()[-1]) for output, _ in ended]


def _consolidate(folder: Path) -> float:
    """Return the peak memory of the command in MB, including torch and TorchRec, which need 300 MB."""
    command = [
        sys.executable,
        "-m",
        "lightning_freescale",
        "consolidate",
        folder / "a.ckpt",
        folder / "b.ckpt",
        "--to",
        "single",
    ]
    process, peak = subprocess.Popen(command, stdout=subprocess.DEVNULL), 0.0
    while process.poll() is None:
        with suppress(OSError, KeyError):  # it has just ended
            peak = max(peak, harness.memory_mb(process.pid)[0])
        time.sleep(0.002)
    if process.returncode:
        raise SystemExit("freescale consolidate failed")
    return peak


def _flip_bytes(options: argparse.Namespace) -> dict[str, float]:
    random, figures = Random(options.seed), {}
    for kind in ("single", "sharded"):
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            path = folder / "a.ckpt"
            _run(options, kind=kind, path=str(path), load=False)
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            whole, found = _digest_of(path), Counter({"damaged": 0, "unchanged": 0, "wrong": 0, "other_errors": 0})
            for _ in range(options.flips):
                found[_read_flipped(path, random.choice(files), random, whole)] += 1
        finally:
            shutil.rmtree(folder)
        print(f"{kind:>8}: {options.flips} changes: " + ", ".join(f"{count} {name}" for name, count in found.items()))
        figures |= {f"{kind}_{name}": float(count) for name, count in found.items()}
    return figures


def _read_flipped(path: Path, file: Path, random: Random, whole: str) -> str:
    size = file.stat().st_size
    # every second change is near an end of the file, where there are no values of tables
    place = random.randrange(size) if random.random() < 0.5 else random.randrange(-4096, 4096) % size
    mask = random.randrange(1, 256)
    alter(file, place, mask)
    try:
        return "unchanged" if _digest_of(path) == whole else "wrong"
    except Exception as error:
        damaged = isinstance(error, ValueError) and "is damaged or incomplete" in str(error)
        if not damaged:
            print(f"byte {place} of {file.name}: {type(error).__name__}: {error}", file=sys.stderr)
        return "damaged" if damaged else "other_errors"
    finally:
        alter(file, place, mask)


def _digest_of(path: Path) -> str:
    from lightning_freescale.checkpoint.conversion import read_checkpoint
    from lightning_freescale.checkpoint.sharded_folder import materialized

    return digest(materialized(read_checkpoint(path)))


class _Peak:
    """The peak memory over a period, in MB: private memory of the process, and mapped files."""

    def __init__(self) -> None:
        self.before, self.mapped_before = harness.memory_mb()
        self.peak, self.mapped = self.before, self.mapped_before
        self._go = True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._go:
            own, mapped = harness.memory_mb()
            self.peak, self.mapped = max(self.peak, own), max(self.mapped, mapped)
            time.sleep(0.002)

    def stop(self) -> tuple[float, float]:
        """Return the increase since the start."""
        self._go = False
        self._thread.join()
        return self.peak - self.before, self.mapped - self.mapped_before


def _rank(given: dict[str, Any]) -> None:
    import lightning as L
    import torch
    from torch import nn
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    from lightning_freescale import FreeScaleStrategy

    torch.set_num_threads(1)
    rows = given["megabytes"] * MEGABYTE // (4 * DIM)
    found: dict[str, float] = {}

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            config = EmbeddingConfig(name="item", num_embeddings=rows, embedding_dim=DIM, feature_names=["f"])
            self.items = EmbeddingCollection(tables=[config], device=torch.device("meta"))
            self.head = nn.Linear(DIM, 1, bias=False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            ids = torch.randint(0, rows, (64,))
            features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones(64, dtype=torch.int32))
            return self.head(self.items(features)["f"].values()).square().mean()

        def configure_optimizers(self) -> Any:
            return RowWiseAdagrad(self.parameters(), lr=0.1)

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step != 3:
                return
            with _timed(found, "copy_s"):  # of the rank's part: the minimum for a save beside training
                copies = [shard.weight.clone() for shard in trainer.strategy.tables.shards()]
            del copies
            torch.distributed.barrier()
            self.peak, self.began = _Peak(), time.monotonic()
            with _timed(found, "save_s"):
                trainer.save_checkpoint(given["path"])

        def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.strategy.files.finish()
            found["whole_s"] = time.monotonic() - self.began
            found["save_mb"], _ = self.peak.stop()

    class Loads(L.Callback):
        def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
            load = trainer.strategy.load_checkpoint

            def measured(*args: Any, **options: Any) -> Any:
                self.peak, self.began = _Peak(), time.monotonic()
                return load(*args, **options)

            trainer.strategy.load_checkpoint = measured

        def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
            found["load_s"] = time.monotonic() - self.began
            found["load_mb"], found["mapped_mb"] = self.peak.stop()

    kind = given["kind"]
    strategy = FreeScaleStrategy(checkpoint=kind)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=given["ranks"], max_steps=4 if given["load"] else 3, logger=False,
        callbacks=[Loads() if given["load"] else Saves()], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), [0] * 8, ckpt_path=given["path"] if given["load"] else None)
    print(json.dumps(found))


@contextmanager
def _timed(found: dict[str, float], name: str) -> Any:
    began = time.monotonic()
    yield
    found[name] = time.monotonic() - began


if __name__ == "__main__":
    main()
