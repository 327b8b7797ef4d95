"""docs/strategy.md: options are taken, and the strategies and data modules that they make."""

import lightning as L
from quick_start import Histories, Recommender, collate
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from tests.docs.excerpts import Excerpts

page = Excerpts("docs/strategy.md")
my_plan = ShardingPlan({"tables": EmbeddingModuleShardingPlan({"item": ParameterSharding("row_wise", "fused")})})
train_set = Histories(64)
history_lengths = train_set.lengths

for _ in range(3):
    page.python(globals())

data = FreeScaleDataModule(train_set, history_lengths, batch_size=16, collate_fn=collate, loss_reduction="target_mean")
strategy = FreeScaleStrategy(checkpoint="sharded")
trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=1, logger=False)
trainer.fit(Recommender(), data)
trainer.save_checkpoint("last.ckpt")
page.python(globals())
page.end()
