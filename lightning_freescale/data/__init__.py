"""From an interactions file or any map-style data set to jagged batches."""

from lightning_freescale.data.histories import HistoryDataset, collate_histories
from lightning_freescale.data.interactions import Histories, read_interactions
from lightning_freescale.data.loader import PlannedLoader

__all__ = ["Histories", "HistoryDataset", "PlannedLoader", "collate_histories", "read_interactions"]
