"""docs/data.md: each data module gives a batch."""

from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from quick_start import Histories, collate
from torch import Tensor

import lightning_freescale
from tests.docs.excerpts import Excerpts

MADE: list[Any] = []


class Kept(lightning_freescale.FreeScaleDataModule):
    """A data module that is kept in ``MADE``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        MADE.append(self)


def batches_of_all() -> int:
    """Return the number of data modules made since the last call; load the first batch of each."""
    made, MADE[:] = list(MADE), []
    for data in made:
        data.setup("fit")
        next(iter(data.train_dataloader()))
    return len(made)


page, lightning_freescale.FreeScaleDataModule = Excerpts("docs/data.md"), Kept
train_set = val_set = Histories(64)
lengths = train_set.lengths
page.python(globals())
assert batches_of_all() == 1

visits = [(user, (user * 7 + visit) % 40, visit) for user in range(64) for visit in range(6 + user % 5)]
users, items, times = (pa.array(column) for column in zip(*visits))
ratings = pa.table({"userId": users, "movieId": items, "timestamp": times})
with pa.CompressedOutputStream("ratings.csv.gz", "gzip") as file:
    pa.csv.write_csv(ratings, file)
Path("ratings.dat").write_text("".join(f"{user}::{item}::5::{time}\n" for user, item, time in visits))
by_user = [[item for user, item, _ in visits if user == one] for one in range(64)]
Path("train.txt").write_text("".join(" ".join(map(str, [user, *items])) + "\n" for user, items in enumerate(by_user)))
days = pa.array([date(2026, 1, 1) + timedelta(time) for *_, time in visits])
frame = pa.table({"user_id": users.cast(pa.string()), "asin": items.cast(pa.string()), "date": days})

page.python(globals())
assert batches_of_all() == 4

Path("histories").mkdir()
for part in range(2):
    here = slice(32 * part, 32 * part + 32)
    table = pa.table(
        {"user": list(range(64))[here], "item": by_user[here], "time": [list(range(len(items))) for items in by_user[here]]}
    )
    pa.parquet.write_table(table, f"histories/{part}.parquet", row_group_size=8)
page.python(globals())
assert batches_of_all() == 1

page.end()
