"""RecBole's sequence models, trained on their own loss as RecBole's trainer does."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from recbole.data.interaction import Interaction
from recbole.model.abstract_recommender import SequentialRecommender
from recbole.model.sequential_recommender.bert4rec import BERT4Rec
from recbole.model.sequential_recommender.fpmc import FPMC
from recbole.model.sequential_recommender.gru4rec import GRU4Rec
from recbole.model.sequential_recommender.lightsans import LightSANs
from recbole.model.sequential_recommender.narm import NARM
from recbole.model.sequential_recommender.sasrec import SASRec
from recbole.model.sequential_recommender.srgnn import SRGNN
from recbole.model.sequential_recommender.stamp import STAMP
from torch import Tensor, nn

from tests.parity.third_party.training import CATALOGUE, DIM, LENGTH, RATES, SAMPLES, Training, sequences

# as RecBole's Config has them by default, also the dropout of the models; sizes and the loss are ours
FIELDS = {
    "USER_ID_FIELD": "user_id",
    "ITEM_ID_FIELD": "item_id",
    "LIST_SUFFIX": "_list",
    "ITEM_LIST_LENGTH_FIELD": "item_length",
    "NEG_PREFIX": "neg_",
    "MAX_ITEM_LIST_LENGTH": LENGTH,
    "MASK_ITEM_SEQ": "Mask_item_id_list",
    "POS_ITEMS": "Pos_item_id",
    "NEG_ITEMS": "Neg_item_id",
    "MASK_INDEX": "MASK_INDEX",
    "device": "cpu",
}
TRANSFORMER = {
    "n_layers": 2,
    "n_heads": 2,
    "hidden_size": DIM,
    "inner_size": 2 * DIM,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.02,
}


class _Items:
    def __init__(self, count: int) -> None:
        self.user_num = self._count = count

    def num(self, field: str) -> int:
        return self._count


class RecBoleTraining(Training):
    """A model of RecBole's with the loss between two items, which only looks rows up."""

    package = "recbole"
    tables = ("model.item_embedding",)
    model_class: ClassVar[type[SequentialRecommender]]
    config: ClassVar[dict[str, Any]]
    loss_type = "BPR"
    first_rows: ClassVar[float | None] = None  # their deviation, where the model's own are too small to be moved in 50 steps

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.model = self.model_class({**FIELDS, **self.config, "loss_type": self.loss_type}, _Items(self.items))
        if self.first_rows is not None:
            nn.init.normal_(self.model.item_embedding.weight, std=self.first_rows)

    def loss(self, batch: Interaction) -> Tensor:
        return self.model.calculate_loss(batch)

    @classmethod
    def batches(cls, seed: int, count: int) -> list[Interaction]:
        return [
            Interaction(
                {
                    "user_id": batch["items"][:, 0].clone(),
                    "item_id_list": batch["items"],
                    "item_length": batch["lengths"],
                    "item_id": batch["positive"][:, 0].clone(),
                    "neg_item_id": batch["negative"][:, 0].clone(),
                }
            )
            for batch in sequences(seed, count, cls.items)
        ]


class SASRecTraining(RecBoleTraining):
    model_class = SASRec
    config = {**TRANSFORMER, "hidden_dropout_prob": 0.5, "attn_dropout_prob": 0.5}
    without_effect = ("attention.key.bias",)


class GRU4RecTraining(RecBoleTraining):
    model_class = GRU4Rec
    config = {"embedding_size": DIM, "hidden_size": 2 * DIM, "num_layers": 1, "dropout_prob": 0.3}
    rates = {"sgd": 5.0, "adagrad": 0.013, "adam": 0.005}  # its rows are drawn the smaller the more there are


class BERT4RecTraining(RecBoleTraining):
    """Predicts masked items; one more row, the last, is the mask."""

    model_class = BERT4Rec
    config = {**TRANSFORMER, "hidden_dropout_prob": 0.2, "attn_dropout_prob": 0.2, "mask_ratio": 0.2}
    without_effect = ("attention.key.bias",)

    @classmethod
    def batches(cls, seed: int, count: int) -> list[Interaction]:
        """Two masked items each, as RecBole's transform makes them of a sequence."""
        found, row = [], torch.arange(SAMPLES)
        for batch, interaction in zip(sequences(seed, count, cls.items), super().batches(seed, count)):
            # an index of 0 is no item to RecBole: a history of two has one to mask
            index = torch.stack([torch.where(batch["lengths"] > 2, batch["lengths"] - 2, 0), batch["lengths"] - 1], dim=1)
            masked, there = batch["items"].clone(), index > 0
            for column in (0, 1):
                masked[row, index[:, column]] = torch.where(there[:, column], cls.items, masked[row, index[:, column]])
            interaction["Mask_item_id_list"], interaction["MASK_INDEX"] = masked, index
            for name, ids in (("Pos_item_id", batch["positive"]), ("Neg_item_id", batch["negative"])):
                interaction[name] = ids.gather(1, index) * there
            found.append(interaction)
        return found


class NARMTraining(RecBoleTraining):
    model_class = NARM
    config = {"embedding_size": DIM, "hidden_size": 2 * DIM, "n_layers": 1, "dropout_probs": [0.25, 0.5]}
    first_rows = 0.5


class SRGNNTraining(RecBoleTraining):
    """Looks up the distinct items of each history, which the model finds in the step."""

    model_class = SRGNN
    config = {"embedding_size": DIM, "step": 1}


class LightSANsTraining(RecBoleTraining):
    model_class = LightSANs
    config = {**TRANSFORMER, "k_interests": 5, "hidden_dropout_prob": 0.5, "attn_dropout_prob": 0.5}
    rates = {**RATES, "adagrad": 0.01}
    without_effect = ("query.bias", "pos_q_linear.bias")  # its softmax is over the queries


class STAMPTraining(RecBoleTraining):
    """Attention over the items of a history, without dropout."""

    model_class = STAMP
    config = {"embedding_size": DIM}
    rates = {"sgd": 1.0, "adagrad": 0.02, "adam": 0.01}
    first_rows = 0.5


class FPMCTraining(RecBoleTraining):
    """Has four tables: of users, and three of items."""

    model_class = FPMC
    tables = ("model.UI_emb", "model.IU_emb", "model.LI_emb", "model.IL_emb")
    config = {"embedding_size": DIM}
    rates = {"sgd": 25.0, "adagrad": 0.08, "adam": 0.07}


class Softmax(RecBoleTraining):
    """RecBole's default loss: a softmax over all items, by the table's weight."""

    loss_type = "CE"
    items = CATALOGUE
    softmax = True


class SASRecSoftmax(Softmax, SASRecTraining):
    pass


class GRU4RecSoftmax(Softmax, GRU4RecTraining):
    rates = {**GRU4RecTraining.rates, "sgd": 1.0}


class BERT4RecSoftmax(Softmax, BERT4RecTraining):
    """Its softmax leaves the mask's row out."""


class NARMSoftmax(Softmax, NARMTraining):
    first_rows = 1.0
    rates = {"sgd": 0.05, "adagrad": 0.04, "adam": 0.01}


class LightSANsSoftmax(Softmax, LightSANsTraining):
    rates = {**LightSANsTraining.rates, "adam": 0.005}
