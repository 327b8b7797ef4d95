"""Meta's HSTU, the research code of generative-recommenders, trained as its ``train_fn`` does; no registry has the package."""

from __future__ import annotations

import torch
from generative_recommenders.research.modeling.sequential.autoregressive_losses import LocalNegativesSampler
from generative_recommenders.research.modeling.sequential.embedding_modules import LocalEmbeddingModule
from generative_recommenders.research.modeling.sequential.hstu import HSTU
from generative_recommenders.research.modeling.sequential.input_features_preprocessors import (
    LearnablePositionalEmbeddingInputFeaturesPreprocessor,
)
from generative_recommenders.research.modeling.sequential.losses.sampled_softmax import SampledSoftmaxLoss
from generative_recommenders.research.modeling.sequential.output_postprocessors import L2NormEmbeddingPostprocessor
from generative_recommenders.research.rails.similarities.dot_product_similarity_fn import DotProductSimilarity
from torch import Tensor

from tests.parity.third_party.training import DIM, ITEMS, LENGTH, POPULAR, RATES, Training, sequences


class HSTUTraining(Training):
    """A sampled softmax over negatives that the step draws; the sampler holds the model's table as well."""

    package = "generative-recommenders"
    rates = {**RATES, "sgd": 0.02, "adagrad": 0.01}
    tables = ("model._embedding_module._item_emb",)

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.model = HSTU(
            max_sequence_len=LENGTH - 1,
            max_output_len=1,
            embedding_dim=DIM,
            num_blocks=2,
            num_heads=2,
            linear_dim=DIM // 2,
            attention_dim=DIM // 2,
            normalization="rel_bias",
            linear_config="uvqk",
            linear_activation="silu",
            linear_dropout_rate=0.2,
            attn_dropout_rate=0.0,
            embedding_module=LocalEmbeddingModule(num_items=ITEMS - 1, item_embedding_dim=DIM),
            similarity_module=DotProductSimilarity(),
            input_features_preproc_module=LearnablePositionalEmbeddingInputFeaturesPreprocessor(LENGTH, DIM, 0.2),
            output_postproc_module=L2NormEmbeddingPostprocessor(DIM),
            verbose=False,
        )
        self.sampler = LocalNegativesSampler(ITEMS - 1, self.model._embedding_module._item_emb, POPULAR.tolist(), True, 1e-6)
        self.ar_loss = SampledSoftmaxLoss(num_to_sample=8, softmax_temperature=0.05, model=self.model)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids, payloads = batch["items"], {"timestamps": batch["times"]}
        rows = self.model.get_item_embeddings(ids)
        states = self.model(past_lengths=batch["lengths"], past_ids=ids, past_embeddings=rows, past_payloads=payloads)
        loss, _ = self.ar_loss(
            lengths=batch["lengths"] - 1,
            output_embeddings=states[:, :-1],
            supervision_ids=ids[:, 1:],
            supervision_embeddings=rows[:, 1:],
            supervision_weights=(ids[:, 1:] != 0).float(),
            negatives_sampler=self.sampler,
            **payloads,
        )
        return loss

    @staticmethod
    def batches(seed: int, count: int) -> list[dict[str, Tensor]]:
        """Histories with a time of each item."""
        return [{**batch, "times": torch.arange(LENGTH).square().expand_as(batch["items"])} for batch in sequences(seed, count)]
