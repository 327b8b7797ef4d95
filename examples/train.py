"""The reference model from the command line.

``python examples/train.py fit --config examples/configs/ml-latest-small.yaml``
"""

from __future__ import annotations

from hstu import CollateWithNegatives, HSTURecommender
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_freescale import FreeScaleDataModule


class RecommenderCLI(LightningCLI):
    """Passes the number of items from the data to the model and to the collate function."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link the number of items to the model."""
        parser.link_arguments("data.histories", "model.num_items", lambda h: h.num_items, apply_on="instantiate")

    def instantiate_classes(self) -> None:
        """Set the collate function, which draws negatives."""
        super().instantiate_classes()
        self.datamodule.collate_fn = CollateWithNegatives(self.datamodule.histories.num_items)


if __name__ == "__main__":
    RecommenderCLI(HSTURecommender, FreeScaleDataModule.from_interactions)
