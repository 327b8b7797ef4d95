"""Histories that need not fit into memory: HSTU trained from Parquet files, of which each rank holds a few row groups.

``python examples/parquet.py`` makes histories up, in the folder ``made_up_histories``, and trains on two ranks. Of your own,
``--path 'histories/*.parquet' --num-items N``, each row is a user, with lists of its items and of their times.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hstu import CollateWithNegatives, HSTURecommender

from lightning_freescale import BubbleProfiler, FreeScaleDataModule

MADE_UP, ITEMS = Path("made_up_histories"), 2_000
COLUMNS = pa.schema({"user": pa.int64(), "item": pa.list_(pa.int64()), "time": pa.list_(pa.int64())})


def write(folder: Path, users: int, files: int = 2, row_groups: int = 12) -> None:
    """Write histories a row group at a time, as a job over a log would; most are short, some long."""
    folder.mkdir()
    of_all = np.array_split(np.arange(users), files * row_groups)
    for file in range(files):
        with pq.ParquetWriter(folder / f"part-{file}.parquet", COLUMNS) as writer:
            for ids in of_all[file::files]:
                writer.write_table(pa.table(make_up(ids), schema=COLUMNS))  # becomes one row group


def make_up(users: np.ndarray) -> dict[str, object]:
    """The columns of some users: the next item follows from the last, but for a little noise."""
    draw = np.random.default_rng(users[0])
    lengths = np.clip(draw.lognormal(3, 1, len(users)), 4, 300).astype(int)
    items = [(draw.integers(ITEMS) + 7 * np.arange(n) + draw.integers(3, size=n)) % ITEMS for n in lengths]
    return {"user": users, "item": items, "time": [np.cumsum(draw.integers(1, 10_000, n)) for n in lengths]}


class HeldRowGroups(L.Callback):
    """Says how much of the data this process had in memory at once."""

    def __init__(self) -> None:
        self.most = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        """Count what is held now."""
        histories = trainer.datamodule.train.dataset.histories
        self.most = max(self.most, sum(map(histories.holds, range(len(histories.first_users) - 1))))

    def on_train_end(self, trainer: L.Trainer, *_: object) -> None:
        """Print it; with ``num_workers`` the loader's workers hold row groups, each as many, and the rank none."""
        row_groups = len(trainer.datamodule.train.dataset.histories.first_users) - 1
        trainer.print(f"held at once: at most {self.most} of {row_groups} row groups")


def main() -> None:
    """Train, validate every epoch, and say how well it does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="a file or a pattern, on a disk that every rank sees (default: made up)")
    parser.add_argument("--num-items", type=int, default=ITEMS, help="item ids are less than this")
    parser.add_argument("--users", type=int, default=2_400, help="how many are made up")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    L.seed_everything(0)
    if options.path is None and not MADE_UP.exists():  # it does where the Trainer has started this process
        write(MADE_UP, options.users)
    # lengths are read now, and a row group when a step needs one of its histories
    data = FreeScaleDataModule.from_parquet(
        options.path or f"{MADE_UP}/*.parquet", user="user", item="item", time="time", row_group_window=4, batch_size=16
    )
    data.collate_fn = CollateWithNegatives(options.num_items, negatives=128)
    trainer = L.Trainer(
        strategy="freescale", accelerator="auto", devices=2, max_epochs=options.epochs,
        callbacks=[BubbleProfiler(), HeldRowGroups()], logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(HSTURecommender(options.num_items, dim=32), data)
    trainer.print("HR@10:", round(trainer.callback_metrics["val_HR@10"].item(), 3))


if __name__ == "__main__":
    main()
