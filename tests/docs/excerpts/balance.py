import numpy as np
from quick_start import Histories

from lightning_freescale import BalanceOptions, FreeScaleDataModule
from tests.docs.excerpts import Excerpts

page = Excerpts("docs/balance.md")
train_set = Histories(640)
lengths = train_set.lengths.numpy()

page.python(globals())
assert plan.lower_bound <= plan.imbalance and len(plan.rank_of_sample) == len(lengths)

page.python(globals())
assert options.calibrate is False

np.savetxt("lengths.txt", np.tile(lengths, 32), fmt="%d")
assert "imbalance" in page.bash()
page.end()
