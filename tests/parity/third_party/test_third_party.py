"""Models of other packages, unchanged, train sharded under "freescale" as unsharded under "ddp"."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import trainer
from tests.parity.third_party.training import (
    STEPS,
    Fit,
    Training,
    fit_both,
    largest_difference,
    loader,
    run_both,
    strategies,
)

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
    """Every model with every optimizer on every number of ranks."""
    every = [(name, optimizer, ranks) for name in MODELS for optimizer in ("sgd", "adagrad", "adam") for ranks in (1, 2, 3)]
    quick = [(name, "sgd", 2) for name in AT_HAND]  # Adagrad does not see a gradient that is too large everywhere
    return [pytest.param(*case, marks=() if case in quick else third_party) for case in every]


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


# not the experts' own tables: without gradients a table is looked up on every rank or on none
ALL_STAGES = [pytest.param(name, marks=() if name in AT_HAND else third_party) for name in MODELS if "experts'" not in name]


@pytest.mark.parametrize("name", ALL_STAGES)
def test_validates_resumes_predicts_and_loads_as_under_ddp(name: str, tmp_path: Path) -> None:
    for ddp, mine in run_distributed(run_both, 2, model(name), "adagrad", tmp_path):
        assert len(ddp.validated) == 2 and ddp.validated[0] != ddp.validated[1]
        assert mine.losses == pytest.approx(ddp.losses, rel=1e-5)
        assert mine.validated == pytest.approx(ddp.validated, rel=1e-5)
        assert mine.resumed == mine.losses[STEPS // 2 :]
        for run in (ddp, mine):
            assert_same(run.loaded, run.predicted, rtol=1e-5, atol=1e-6)
        assert_same(mine.predicted, ddp.predicted, rtol=1e-5, atol=1e-5)


@third_party
@pytest.mark.parametrize("kind", ["SASRecSoftmax", "GRU4RecSoftmax", "BERT4RecSoftmax"])
def test_a_softmax_over_the_whole_table_is_refused_and_trains_with_it_left_whole(kind: str) -> None:
    softmax = model(f"recbole_models.{kind}")
    with pytest.raises(RankFailed, match=r"model\.item_embedding\.weight is sharded.*leave 'model\.item_embedding' out"):
        run_distributed(fit_both, 2, softmax, "adagrad")
    _assert_trained_alike(run_distributed(fit_both, 2, softmax, "adagrad", shard=None), softmax)


def _busy_experts() -> list[list[bool]]:
    kind = model("mixture of experts")
    module = kind("adagrad")
    trainer(strategy=strategies(kind)[1], devices=2).fit(module, loader(kind, STEPS))
    return module.busy


def test_some_experts_have_nothing_to_do_on_some_ranks() -> None:
    """Or nothing of what the mixture is here for would be tested."""
    first, second = run_distributed(_busy_experts, 2)
    assert any(one and not other for step in zip(first, second) for one, other in zip(*step))
    assert any(not one and not other for step in zip(first, second) for one, other in zip(*step))


def test_a_difference_is_found() -> None:
    same, other = Fit([1.0, 0.5], {}), Fit([1.0, 0.51], {})
    assert largest_difference([[same, same]]) == 0
    assert largest_difference([[same, same], [same, other]]) == pytest.approx(0.02)
