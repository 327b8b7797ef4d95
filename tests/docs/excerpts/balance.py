import contextlib
import io

import numpy as np
from quick_start import Histories

from lightning_freescale import BalanceOptions, FreeScaleDataModule
from tests.docs.excerpts import Excerpts
from tests.docs.pages import ROOT

page = Excerpts("docs/balance.md")
train_set = Histories(640)
lengths = train_set.lengths.numpy()

page.python(globals())
assert plan.lower_bound <= plan.imbalance and len(plan.rank_of_sample) == len(lengths)

printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    page.python(globals())
assert f"```text\n{printed.getvalue()}```" in (ROOT / page.page).read_text()

page.python(globals())
assert data.train.budget.per_rank == 16_384 and data.train.assignment_mode == "free"

page.python(globals())
assert options.calibrate is False

np.savetxt("lengths.txt", np.tile(lengths, 32), fmt="%d")
assert "imbalance" in page.bash()
page.end()
