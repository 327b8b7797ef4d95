from pathlib import Path

import numpy as np

from lightning_freescale.balance import CostModel
from lightning_freescale.balance.cost import sample_features
from lightning_freescale.balance.simulate import summarize_lengths
from tests.docs.excerpts import Excerpts, shell
from tests.helpers.reports import TABLES, report_of, step

page = Excerpts("docs/simulator.md")
draw = np.random.default_rng(0)
np.savetxt("lengths.txt", draw.lognormal(4, 1, 2000).round() + 1, fmt="%d")
histories = draw.lognormal(4, 1, (30, 2, 8)).round() + 1
workload = {"lengths": summarize_lengths(histories.ravel()), "tables": TABLES, "collision_rate": 0.3}
workload |= {"lookups": 2 * 8 * float(histories.mean())}
seconds = CostModel(linear=3e-5, quadratic=2e-8)(histories).sum(axis=2)
parts = np.array([[step(0.1, forward=each, host_overhead=0.004) for each in ranks] for ranks in seconds])
measured = {"features": sample_features(histories).sum(axis=2), "workload": workload}
report_of(parts, np.full((30, 2), 8), **measured).write("bubbles/report.json")

printed = page.bash()
assert printed.count("predicted, not measured") == 3 and "4,001, measured: report.json" in printed
assert "<title>Predicted steps</title>" in Path("predicted.html").read_text()

Path("network.json").write_text(page.text("json"))
line = "freescale simulate --lengths lengths.txt --ranks 16 --batch-size 32 --compute-ms 100 --network network.json"
assert "measured: nccl-tests" in shell(line)
page.end()
