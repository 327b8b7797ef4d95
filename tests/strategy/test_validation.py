"""Every bad input is refused before training starts, by an error that names argument, value and fix."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, data_parallel, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import LAMB
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.data import BalanceOptions
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.recommender import Recommender, Samples, collate, trainer

DATA = Samples(8)


def _fit(module: L.LightningModule | None = None, samples: int = 16, data: Any = None, **options: Any) -> None:
    samples_ = Samples(samples)
    data = data or FreeScaleDataModule(samples_, samples_.lengths, 2, collate_fn=collate)
    trainer(devices=int(os.environ["WORLD_SIZE"]), **options).fit(module or Recommender(), data)


def test_fewer_samples_than_ranks() -> None:
    with pytest.raises(RankFailed, match="1 samples for 2 ranks"):
        run_distributed(_fit, 2, samples=1)


def _fit_with_few_to_validate() -> None:
    samples = Samples(16)
    data = FreeScaleDataModule(samples, samples.lengths, 2, collate_fn=collate, val_dataset=Samples(1))
    trainer(devices=int(os.environ["WORLD_SIZE"])).fit(Recommender(), data)


def test_fewer_samples_to_validate_than_ranks() -> None:
    with pytest.raises(RankFailed, match=r"FreeScaleDataModule\(val_dataset=...\): 1 samples for 2 ranks"):
        run_distributed(_fit_with_few_to_validate, 2)


class DecayedAdagrad(Recommender):
    """Its optimizer has states from the beginning, of tables that have no memory yet."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), 0.1, weight_decay=0.1)


def test_a_refused_optimizer_is_what_the_run_ends_with() -> None:
    with pytest.raises(RankFailed, match=r"Adagrad\(weight_decay=0.1\) holds the embedding table") as error:
        run_distributed(lambda: _fit(DecayedAdagrad()), 1)
    assert "meta" not in str(error.value)


def test_drop_last_leaves_nothing() -> None:
    with pytest.raises(ValueError, match=r"drop_last=True leaves no step: 8 samples"):
        FreeScaleDataModule(DATA, DATA.lengths, 16, drop_last=True).sampler(0, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "64-true"}, r"precision='64-true'"),
        ({"overfit_batches": 1}, r"overfit_batches=1.*limit_train_batches"),
    ],
)
def test_trainer_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_distributed(_fit, 2, **options)


class Manual(Recommender):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class With(Recommender):
    """Trains with an optimizer made from its parameters."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual, "automatic_optimization=False"),
        (lambda: With(torch.optim.RMSprop), r"RMSprop holds .*apply_optimizer_in_backward"),
        (lambda: With(lambda p: torch.optim.SGD(p, momentum=0.9)), r"momentum=0.9.*momentum=0"),
        (lambda: With(lambda p: torch.optim.Adagrad(p, weight_decay=0.1)), r"weight_decay=0.1.*weight_decay=0"),
        (lambda: With(lambda p: torch.optim.Adagrad(p, lr_decay=0.1)), r"lr_decay=0.1.*lr_decay=0"),
    ],
)
def test_module(module: Any, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_distributed(lambda: _fit(module()), 2)


def _fit_plain(**options: Any) -> None:
    _fit(strategy=FreeScaleStrategy(overlap=False), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"module": With(torch.optim.Adam)},
            r"Adam holds .*'net.embeddings.embeddings.item.weight'.* no Adam on CPU.*overlap=True.*RowWiseAdagrad",
        ),
        ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2.*overlap=True.*larger batch_size"),
        ({"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}, "GradientAccumulationScheduler"),
    ],
)
def test_what_plain_torchrec_cannot_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_distributed(_fit_plain, 2, **options)


def _refit_after_error() -> bool:
    torch.manual_seed(0)
    module = With(torch.optim.RMSprop)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match="RMSprop holds"):
        _fit(module)
    kept = all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    module.make = torch.optim.SGD
    _fit(module)
    return kept


def test_module_survives_the_error() -> None:
    assert all(run_distributed(_refit_after_error, 2))


class FarIds(Samples):
    """One sample looks up an id that no row exists for."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "candidate": torch.tensor(50)} if index == 3 else sample


def _fit_far_ids() -> None:
    data = FarIds(16)
    _fit(data=FreeScaleDataModule(data, data.lengths, 8, collate_fn=collate))


def test_id_beyond_the_table() -> None:
    with pytest.raises(RankFailed, match=r"feature 'candidate' holds id 50, but table 'item' has num_embeddings=50"):
        run_distributed(_fit_far_ids, 2)


def _fit_needing_rows() -> None:
    data = FreeScaleDataModule(DATA, DATA.lengths, 2, collate_fn=collate)
    data.feature_rows = {"history": 51}
    _fit(data=data)


def test_table_smaller_than_the_data() -> None:
    with pytest.raises(RankFailed, match=r"51 different ids of feature 'history'.*num_embeddings=51 or more"):
        run_distributed(_fit_needing_rows, 2)


def test_strategy_arguments() -> None:
    with pytest.raises(ValueError, match=r"clip='tables'.*'all' or 'dense'"):
        FreeScaleStrategy(clip="tables")


def _fit_with_plan() -> None:
    _fit(strategy=FreeScaleStrategy(plan=ShardingPlan({})))


def test_plan_without_the_collection() -> None:
    with pytest.raises(RankFailed, match=r"no entry for collection 'net.embeddings' with tables \['item', 'cat'\]"):
        run_distributed(_fit_with_plan, 2)


def _resume_after_change(changed: dict[str, int]) -> None:
    data = FreeScaleDataModule(DATA, DATA.lengths, 2, collate_fn=collate)
    fit = trainer(devices=2, max_epochs=2, max_steps=1)
    fit.fit(Recommender(), data)
    fit.state.fn = "fit"
    data.load_state_dict({**data.state_dict(), "batches": 1, **changed})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": {"assignment_mode": "slack"}}, r"mode='slack'\) needs Trainer\(strategy='freescale'\)"),
        ({"loss_reduction": "target_mean"}, r"loss_reduction='target_mean'.*loss_reduction='unweighted'"),
        ({"balance": {"calibrate": True}}, r"calibrate=True\) needs Trainer\(strategy='freescale'\)"),
        ({"balance": {"outlier_window": 0}}, r"outlier_window=0"),
        ({"balance": {"assignment_mode": "best"}}, r"mode='best'"),
        ({"balance": {"rank_speeds": [1.0]}}, r"rank_speeds=\[1.0\].*shape \[2\]"),
        ({"balance": {"max_tokens_per_rank": 1}}, r"max_tokens_per_rank=1"),
    ],
)
def test_plans_that_do_not_go_with_ddp_or_at_all(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_distributed(_fit_under_ddp, 2, options)


def _fit_under_ddp(options: dict[str, Any]) -> None:
    if "balance" in options:
        options = {**options, "balance": BalanceOptions(**options["balance"])}
    data = FreeScaleDataModule(DATA, DATA.lengths, 2, collate_fn=collate, **options)
    trainer(strategy="ddp", devices=2, max_steps=1).fit(Recommender(), data)


def test_unweighted_scales_no_loss() -> None:
    free = BalanceOptions(assignment_mode="free")
    for reduction, scaled in (("sample_mean", True), ("unweighted", False)):
        data = FreeScaleDataModule(Samples(60), Samples(60).lengths, 4, balance=free, loss_reduction=reduction)
        sampler = data.sampler(0, 3)
        weights = {sampler.loss_weight(step) for step in range(len(sampler))}
        assert (weights != {1.0}) == scaled


def test_unweighted_goes_with_ddp() -> None:
    run_distributed(_fit_under_ddp, 2, {"balance": {"assignment_mode": "slack"}, "loss_reduction": "unweighted"})


@pytest.mark.parametrize(("name", "value"), [("samples", 7), ("shuffle", 0), ("outlier_window", 4)])
def test_mid_epoch_resume_with_another_plan(name: str, value: int) -> None:
    with pytest.raises(RankFailed, match=rf"stopped inside an epoch with {name}={value}, this run has {name}="):
        run_distributed(_resume_after_change, 2, {name: value})


def _fit_with(plan: Any, in_backward: Any = None) -> None:
    module = Recommender()
    if in_backward is not None:
        apply_optimizer_in_backward(in_backward, module.net.embeddings.parameters(), {"lr": 0.1})
    if plan is not None:
        world = int(os.environ["WORLD_SIZE"])
        tables = {config.name: plan for config in module.net.embeddings.embedding_configs()}
        entry = construct_module_sharding_plan(
            module.net.embeddings, tables, local_size=world, world_size=world, device_type="cpu"
        )
        _fit(module, strategy=FreeScaleStrategy(plan=ShardingPlan({"net.embeddings": entry})))
    _fit(module)


@pytest.mark.parametrize(
    ("plan", "in_backward", "message"),
    [
        (data_parallel(), None, r"table 'item' sharding_type='data_parallel'.*compute_kernel=\"fused\""),
        (row_wise(), None, r"compute_kernel='dense'.*compute_kernel=\"fused\""),
        (
            column_wise(ranks=[0, 1], compute_kernel="fused"),
            RowWiseAdagrad,
            r"splits the columns of table 'item'.*RowWiseAdagrad",
        ),
        (None, LAMB, r"LAMB, applied in backward to table 'net.embeddings.embeddings.item.weight', .* on CPU"),
        (None, torch.optim.NAdam, r"NAdam, applied in backward to table .* has no fused form"),
    ],
)
def test_plan_and_in_backward_optimizer(plan: Any, in_backward: Any, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_distributed(_fit_with, 2, plan, in_backward)


class Skips(Recommender):
    """Accumulates by hand: steps every second batch."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()


def test_accumulation_by_hand() -> None:
    with pytest.raises(RankFailed, match="second backward without an optimizer step"):
        run_distributed(lambda: _fit(Skips()), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging copies the unsharded module"),
        ({"strategy": FreeScaleStrategy(start_method="fork")}, "start_method='fork'"),
        ({"strategy": FreeScaleStrategy(model_averaging_period=2)}, "model_averaging_period=2"),
    ],
)
def test_callbacks_and_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_distributed(_fit_refused, 2, options)


def _fit_refused(options: dict[str, Any]) -> None:
    from lightning_freescale.strategy.validation import refuse_options

    if "strategy" in options:  # Lightning would launch processes of its own
        refuse_options(options["strategy"]._start_method, options["strategy"]._model_averaging_period)
    _fit(**options)


def _fit_loader_of_one_rank() -> None:
    trainer(devices=2).fit(Recommender(), FreeScaleDataModule(DATA, DATA.lengths, 2, collate_fn=collate).train_dataloader())


def test_loader_made_without_a_trainer() -> None:
    with pytest.raises(RankFailed, match=r"num_replicas=1, the Trainer has 2 ranks: .*datamodule=data"):
        run_distributed(_fit_loader_of_one_rank, 2)


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("overlp", "did you mean overlap="),
        ("find_unused_params", "did you mean find_unused_parameters="),
        ("zzz", "see its docstring and DistributedDataParallel's"),
    ],
)
def test_an_unknown_option_is_refused_at_once(option: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"FreeScaleStrategy\({option}=...\): there is no such option, {meant}"):
        FreeScaleStrategy(**{option: True})


def test_options_of_ddp_are_taken() -> None:
    FreeScaleStrategy(find_unused_parameters=True, gradient_as_bucket_view=True, process_group_backend="gloo")
