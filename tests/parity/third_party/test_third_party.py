"""Models of other packages, unchanged, train sharded under "freescale" as unsharded under "ddp"."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from lightning_freescale.embeddings import plain_embedding
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.overlap_training import assert_same
from tests.parity.third_party.training import CATALOGUE, DIM, STEPS, Fit, Training, fit_both

MODELS = {
    "SASRec": "recbole_models.SASRecTraining",
    "GRU4Rec": "recbole_models.GRU4RecTraining",
    "BERT4Rec": "recbole_models.BERT4RecTraining",
    "NARM": "recbole_models.NARMTraining",
    "SRGNN": "recbole_models.SRGNNTraining",
    "LightSANs": "recbole_models.LightSANsTraining",
    "STAMP": "recbole_models.STAMPTraining",
    "FPMC": "recbole_models.FPMCTraining",
    "MMOE": "torch_rechub_models.MMOETraining",
    "DIN": "torch_rechub_models.DINTraining",
    "DeepFM": "deepctr_torch_models.DeepFMTraining",
    "HSTU": "generative_recommenders_models.HSTUTraining",
    "DLRM": "torchrec_models.DLRMTraining",
    "Llama": "transformers_models.LlamaTraining",
    "Llama's own table": "transformers_models.LlamaOwnTable",
    "Bert": "transformers_models.BertTraining",
    "Bert's own table": "transformers_models.BertOwnTable",
    "GPT2's own table": "transformers_models.GPT2OwnTable",
    "Mamba's own table": "transformers_models.MambaOwnTable",
    "T5 encoder's own table": "transformers_models.T5EncoderOwnTable",
    "SASRec, softmax": "recbole_models.SASRecSoftmax",
    "GRU4Rec, softmax": "recbole_models.GRU4RecSoftmax",
    "BERT4Rec, softmax": "recbole_models.BERT4RecSoftmax",
    "NARM, softmax": "recbole_models.NARMSoftmax",
    "LightSANs, softmax": "recbole_models.LightSANsSoftmax",
    "RePlay's SasRec, softmax": "replay_models.SasRecSoftmax",
    "RePlay's earlier SasRec, softmax": "replay_models.EarlierSasRecSoftmax",
    "RePlay's Bert4Rec, softmax": "replay_models.Bert4RecSoftmax",
    "RecTools' SASRec, softmax": "rectools_models.SASRecSoftmax",
    "GPT2, softmax": "transformers_models.GPT2Softmax",
    "Llama, softmax": "transformers_models.LlamaSoftmax",
    "mixture of experts": "mixture_of_experts.MixtureTraining",
    "experts' own tables": "mixture_of_experts.ExpertTables",
}
AT_HAND = ("DLRM", "mixture of experts")
"""Those that need no other package are in the second tier; the rest is tested where it is asked for."""
third_party = pytest.mark.third_party


def model(name: str) -> type[Training]:
    """Return a model, or skip the test where its package is not installed."""
    file, kind = MODELS.get(name, name).split(".")
    package = file.removesuffix("_models")
    if package != file:
        pytest.importorskip(package)
    return getattr(import_module(f"tests.parity.third_party.{file}"), kind)


def _cases() -> list:
    """Every model with every optimizer, and on every number of ranks."""
    pairs = [("sgd", 2), ("adagrad", 3), ("adam", 1)]
    quick = [(name, "sgd", 2) for name in AT_HAND]  # Adagrad does not see a gradient that is too large everywhere
    every = [(name, *pair) for name in MODELS for pair in pairs if (name, *pair) not in quick]
    at_hand = [pytest.param(*case, marks=pytest.mark.slow) for case in (*quick, ("mixture of experts", "adam", 2))]
    return [*at_hand, *(pytest.param(*case, marks=third_party) for case in every)]


def _assert_trained_alike(fits: list[list[Fit]], kind: type[Training], optimizer: str) -> None:
    for ddp, mine in fits:
        assert len(ddp.losses) == STEPS
        assert max(ddp.losses) / min(ddp.losses) > 1.1, "the loss must move, or equality means nothing"
        assert mine.losses == pytest.approx(ddp.losses, rel=1e-5)
        assert mine.mispredicted == 0
    ddp, mine = fits[0]
    for weights in (ddp.weights, mine.weights):
        for name in weights:
            if name.endswith(kind.without_effect):
                weights[name] = torch.zeros(())
    # with a softmax, gradients of single numbers cancel to their rounding, which Adam and Adagrad divide by itself: a few of
    # thousands are another part of one update, also under "ddp" from weights that differ in their last bit
    cancels = kind.softmax and optimizer != "sgd"
    assert_same(mine.weights, ddp.weights, rtol=1e-5, atol=kind.rates[optimizer] / 100 if cancels else 1e-6)


@pytest.mark.parametrize(("name", "optimizer", "ranks"), _cases())
def test_trains_as_under_ddp(name: str, optimizer: str, ranks: int) -> None:
    kind = model(name)
    _assert_trained_alike(run_distributed(fit_both, ranks, kind, optimizer), kind, optimizer)


@third_party
@pytest.mark.parametrize("name", ["SASRec, softmax", "GPT2, softmax"])
def test_auto_shards_the_table_of_a_softmax(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_embedding, "LARGE_EMBEDDING", CATALOGUE * DIM)
    kind = model(name)
    assert tuple(plain_embedding.choose_embeddings(kind("adam"), "auto").chosen) == kind.tables
    _assert_trained_alike(run_distributed(fit_both, 2, kind, "adam", shard="auto"), kind, "adam")


REFUSED = {
    "a sigmoid for every row": ("replay_models.EarlierSasRecBinary", r"model\._model\.item_embedder\.item_emb\.weight"),
    "an L2 norm of weights kept in a list": (
        "deepctr_torch_models.DeepFMDefaults",
        r"'model\.embedding_dict\.item\.weight'",
    ),
}


@third_party
@pytest.mark.parametrize("use", REFUSED)
def test_what_uses_the_whole_table_is_refused_and_trains_with_it_left_whole(use: str) -> None:
    name, message = REFUSED[use]
    kind = model(name)
    with pytest.raises(RankFailed, match=message):
        run_distributed(fit_both, 2, kind, "adagrad")
    _assert_trained_alike(run_distributed(fit_both, 2, kind, "adagrad", shard=None), kind, "adagrad")
