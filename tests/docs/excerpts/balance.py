import numpy as np
from quick_start import Histories

from lightning_freescale.balance import assign
from tests.docs.excerpts import Excerpts

page = Excerpts("docs/balance.md")

plan = assign([40, 30, 20, 10, 20, 10, 6, 4], ranks=2)
assert plan.imbalance == plan.lower_bound == 1

np.savetxt("lengths.txt", np.tile(Histories(640).lengths.numpy(), 32), fmt="%d")
assert "imbalance" in page.bash()
page.end()
