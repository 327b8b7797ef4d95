"""Models of other packages, unchanged, train sharded under "freescale" as unsharded under "ddp"."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.overlap_training import assert_same
from tests.parity.third_party.training import STEPS, Fit, Training, fit_both

MODELS = {
    "SASRec": "recbole_models.SASRecTraining",
    "GRU4Rec": "recbole_models.GRU4RecTraining",
    "BERT4Rec": "recbole_models.BERT4RecTraining",
    "DLRM": "torchrec_models.DLRMTraining",
    "Llama": "transformers_models.LlamaTraining",
    "Llama's own table": "transformers_models.LlamaOwnTable",
    "Bert": "transformers_models.BertTraining",
    "Bert's own table": "transformers_models.BertOwnTable",
    "mixture of experts": "mixture_of_experts.MixtureTraining",
    "experts' own tables": "mixture_of_experts.ExpertTables",
}
AT_HAND = ("DLRM", "mixture of experts")
"""Those that need no other package are always tested, in one case; the rest where it is asked for."""
third_party = pytest.mark.third_party


def model(name: str) -> type[Training]:
    """Return a model, or skip the test where its package is not installed."""
    file, kind = MODELS.get(name, name).split(".")
    for package in ("recbole", "transformers"):
        if file.startswith(package):
            pytest.importorskip(package)
    return getattr(import_module(f"tests.parity.third_party.{file}"), kind)


def _cases() -> list:
    """Every model with every optimizer, and on every number of ranks."""
    pairs = [("sgd", 2), ("adagrad", 3), ("adam", 1)]
    quick = [(name, "sgd", 2) for name in AT_HAND]  # Adagrad does not see a gradient that is too large everywhere
    every = [(name, *pair) for name in MODELS for pair in pairs if (name, *pair) not in quick]
    adam = pytest.param("mixture of experts", "adam", 2, marks=pytest.mark.slow)
    return [*quick, adam, *(pytest.param(*case, marks=third_party) for case in every)]


def _assert_trained_alike(fits: list[list[Fit]], kind: type[Training]) -> None:
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
    assert_same(mine.weights, ddp.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "optimizer", "ranks"), _cases())
def test_trains_as_under_ddp(name: str, optimizer: str, ranks: int) -> None:
    kind = model(name)
    _assert_trained_alike(run_distributed(fit_both, ranks, kind, optimizer), kind)


@third_party
def test_a_softmax_over_the_whole_table_is_refused_and_trains_with_it_left_whole() -> None:
    softmax = model("recbole_models.SASRecSoftmax")
    with pytest.raises(RankFailed, match=r"model\.item_embedding"):
        run_distributed(fit_both, 2, softmax, "adagrad")
    _assert_trained_alike(run_distributed(fit_both, 2, softmax, "adagrad", shard=None), softmax)
