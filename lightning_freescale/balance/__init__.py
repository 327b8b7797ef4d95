"""Assign the samples of a step so that all ranks finish together. Needs neither Lightning nor TorchRec."""

from lightning_freescale.balance.assign import Assignment, assign
from lightning_freescale.balance.budget import Budget
from lightning_freescale.balance.cost import CostFit, CostModel
from lightning_freescale.balance.forecast import advise, predict
from lightning_freescale.balance.global_batches import BlockShuffle
from lightning_freescale.balance.micro_batches import MicroBatches, MicroBatchSchedule
from lightning_freescale.balance.report import BalanceReport, StepBalance
from lightning_freescale.balance.sampler import BalancedSampler

__all__ = [
    "Assignment",
    "BalanceReport",
    "BalancedSampler",
    "BlockShuffle",
    "Budget",
    "CostFit",
    "CostModel",
    "MicroBatchSchedule",
    "MicroBatches",
    "StepBalance",
    "advise",
    "assign",
    "predict",
]
