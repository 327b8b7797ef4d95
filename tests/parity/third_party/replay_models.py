"""RePlay's sequence models, with their default loss: a softmax over all items, by the table's weight."""

from __future__ import annotations

from typing import ClassVar

import torch
from replay.data import FeatureHint, FeatureSource, FeatureType
from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema
from replay.models.nn.sequential import Bert4Rec
from replay.models.nn.sequential import SasRec as EarlierSasRec
from replay.nn.sequential import SasRec
from torch import Tensor

from tests.parity.third_party.training import CATALOGUE, DIM, LENGTH, Training

PADDING = CATALOGUE
"""The row behind those of the items, which the softmax leaves out."""


def _schema(padding: int) -> TensorSchema:
    options = {"embedding_dim": DIM, "cardinality": CATALOGUE, "padding_value": padding, "feature_hint": FeatureHint.ITEM_ID}
    source = TensorFeatureSource(FeatureSource.INTERACTIONS, "item")
    return TensorSchema([TensorFeatureInfo("item", FeatureType.CATEGORICAL, True, feature_sources=[source], **options)])


class SasRecSoftmax(Training):
    """Selects the rows of the items by a mask."""

    package = "replay-rec"
    tables = ("model.body.embedder.feature_embedders.item.emb",)
    items = CATALOGUE
    softmax = True
    without_effect = ("in_proj_bias",)  # a third of it is the keys'

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        sizes = {"embedding_dim": DIM, "num_heads": 2, "max_sequence_length": LENGTH}
        self.model = SasRec.from_params(_schema(PADDING), **sizes)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        there = batch["items"] != 0
        items = batch["items"].masked_fill(~there, PADDING)
        labels = {"positive_labels": batch["positive"][..., None], "target_padding_mask": there[..., None]}
        return self.model({"item": items}, there, negative_labels=None, **labels)["loss"]


class EarlierSasRecSoftmax(SasRecSoftmax):
    """RePlay's module for Lightning, with the loss of its training step."""

    tables = ("model._model.item_embedder.item_emb",)
    loss_type: ClassVar[str] = "CE"

    def __init__(self, optimizer: str) -> None:
        Training.__init__(self, optimizer)
        sizes = {"hidden_size": DIM, "max_seq_len": LENGTH}
        self.model = EarlierSasRec(_schema(PADDING), loss_type=self.loss_type, **sizes)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        there, named = batch["items"] != 0, {"feature_tensor": {"item": batch["items"]}, "positive_labels": batch["positive"]}
        return self.model._compute_loss({**named, "padding_mask": there, "target_padding_mask": there})


class EarlierSasRecBinary(EarlierSasRecSoftmax):
    """A sigmoid for each item and position."""

    loss_type = "BCE"


class Bert4RecSoftmax(EarlierSasRecSoftmax):
    """The output layer has the table's weight and a bias; the last position is masked."""

    tables = ("model._model.item_embedder.cat_embeddings.item",)

    def __init__(self, optimizer: str) -> None:
        Training.__init__(self, optimizer)
        sizes = {"hidden_size": DIM, "head_count": 2, "max_seq_len": LENGTH}
        self.model = Bert4Rec(_schema(0), enable_embedding_tying=True, **sizes)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        there = batch["items"] != 0
        shown = torch.arange(LENGTH) != batch["lengths"][:, None] - 1
        named = {"inputs": {"item": batch["items"]}, "positive_labels": batch["positive"]}
        return self.model._compute_loss({**named, "pad_mask": there, "token_mask": shown})
