"""Assign the samples of a step so that all ranks finish together. Needs neither Lightning nor TorchRec."""

from lightning_freescale.balance.assign import Assignment, assign
from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.report import BalanceReport
from lightning_freescale.balance.sampler import BalancedSampler

__all__ = ["Assignment", "BalanceReport", "BalancedSampler", "CostModel", "assign"]
