"""Training of HSTU with histories larger than memory: each rank keeps a few row groups of Parquet files.

``python examples/parquet.py`` writes synthetic histories to the folder ``made_up_histories``, and trains on two ranks. To use
your own files, pass ``--path 'histories/*.parquet' --num-items N``. Each row must be a user, with lists of items and times.
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
    """Write histories by row group. Most histories are short, and some are long."""
    folder.mkdir()
    of_all = np.array_split(np.arange(users), files * row_groups)
    for file in range(files):
        with pq.ParquetWriter(folder / f"part-{file}.parquet", COLUMNS) as writer:
            for ids in of_all[file::files]:
                writer.write_table(pa.table(make_up(ids), schema=COLUMNS))  # one row group


def make_up(users: np.ndarray) -> dict[str, object]:
    """Return the columns of some users. The last item determines the next one, up to a little noise."""
    draw = np.random.default_rng(users[0])
    lengths = np.clip(draw.lognormal(3, 1, len(users)), 4, 300).astype(int)
    items = [(draw.integers(ITEMS) + 7 * np.arange(n) + draw.integers(3, size=n)) % ITEMS for n in lengths]
    return {"user": users, "item": items, "time": [np.cumsum(draw.integers(1, 10_000, n)) for n in lengths]}


class HeldRowGroups(L.Callback):
    """Prints the largest share of the data in the memory of this process."""

    def __init__(self) -> None:
        self.most = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        """Count the row groups in memory."""
        histories = trainer.datamodule.train.dataset.histories
        self.most = max(self.most, sum(map(histories.holds, range(len(histories.first_users) - 1))))

    def on_train_end(self, trainer: L.Trainer, *_: object) -> None:
        """Print the largest number. With ``num_workers``, row groups are in the memory of each worker instead."""
        row_groups = len(trainer.datamodule.train.dataset.histories.first_users) - 1
        trainer.print(f"in memory at the same time: at most {self.most} of {row_groups} row groups")


def main() -> None:
    """Train, validate every epoch, and print the hit rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="a file or pattern on a disk that all ranks share (default: synthetic data)")
    parser.add_argument("--num-items", type=int, default=ITEMS, help="number of items; ids must be smaller")
    parser.add_argument("--users", type=int, default=2_400, help="number of synthetic users")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    L.seed_everything(0)
    if options.path is None and not MADE_UP.exists():  # it exists in processes that the Trainer starts
        write(MADE_UP, options.users)
    # reads lengths now, and row groups when a step needs one of their histories
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
