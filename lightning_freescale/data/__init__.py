"""Balanced batches from interaction files, histories in Parquet files, map-style data sets and streams."""

from lightning_freescale.data.balanced_loader import BalancedDataLoader
from lightning_freescale.data.interactions import Histories, HistoryDataset, collate_histories, read_interactions
from lightning_freescale.data.options import BalanceOptions
from lightning_freescale.data.parquet import ParquetHistories
from lightning_freescale.data.streaming import BalancedStreamLoader

__all__ = [
    "BalanceOptions",
    "BalancedDataLoader",
    "BalancedStreamLoader",
    "Histories",
    "HistoryDataset",
    "ParquetHistories",
    "collate_histories",
    "read_interactions",
]
