"""RecTools' SASRec, with its default loss: a softmax over all items."""

from __future__ import annotations

from rectools.models.nn.item_net import IdEmbeddingsItemNet, SumOfEmbeddingsConstructor
from rectools.models.nn.transformers.lightning import TransformerLightningModule
from rectools.models.nn.transformers.net_blocks import LearnableInversePositionalEncoding
from rectools.models.nn.transformers.sasrec import SASRecTransformerLayers
from rectools.models.nn.transformers.similarity import DistanceSimilarityModule
from rectools.models.nn.transformers.torch_backbone import TransformerTorchBackbone
from torch import Tensor

from tests.parity.third_party.training import CATALOGUE, DIM, LENGTH, Training


class SASRecSoftmax(Training):
    """Looks all rows up in every step, and computes states and logits from those; dropout as in RecTools' own settings.

    RecTools' module for Lightning is one of the package ``pytorch_lightning``, whose Trainer it asks for: here it is a part.
    """

    package = "rectools"
    tables = ("model.torch_model.item_model.item_net_blocks.0.ids_emb",)
    items = CATALOGUE
    softmax = True
    without_effect = ("in_proj_bias",)  # a third of it is the keys'

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        backbone = TransformerTorchBackbone(
            n_heads=2,
            dropout_rate=0.2,
            item_model=SumOfEmbeddingsConstructor(CATALOGUE, [IdEmbeddingsItemNet(DIM, CATALOGUE, 0.2)]),
            pos_encoding_layer=LearnableInversePositionalEncoding(True, LENGTH, DIM),
            transformer_layers=SASRecTransformerLayers(2, DIM, 2, 0.2),
            similarity_module=DistanceSimilarityModule(),
        )
        given = {"model_config": {}, "dataset_schema": {}, "item_external_ids": [], "item_extra_tokens": [0]}
        self.model = TransformerLightningModule(backbone, **given, data_preparator=None, lr=0.0, gbce_t=0.0, loss="softmax")

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        there = (batch["items"] != 0).float()
        logits = self.model.get_batch_logits({"x": batch["items"]})
        return self.model.loss_calculator(logits, batch["positive"], there)
