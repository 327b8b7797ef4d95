"""FreeScaleStrategy refuses what it cannot train exactly, by an error that names the argument, its value and the fix."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning_utilities.core import rank_zero
from torch.utils.data import DataLoader
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, table_row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import LAMB
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale import FreeScaleDataModule, FreeScaleFabricStrategy, FreeScaleStrategy
from lightning_freescale.data import BalanceOptions
from lightning_freescale.testing import run_distributed
from lightning_freescale.training.setup import refuse_ddp_options
from tests.docs.pages import DOCS
from tests.helpers.recommender import Recommender, Samples, collate, trainer


def _data(samples: int = 16, **options: Any) -> FreeScaleDataModule:
    data = Samples(samples)
    return FreeScaleDataModule(data, data.lengths, 2, collate_fn=collate, **options)


def _fit(module: L.LightningModule | None = None, data: Any = None, **options: Any) -> None:
    trainer(devices=int(os.environ["WORLD_SIZE"]), **options).fit(module or Recommender(), data or _data())


class Manual(Recommender):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class With(Recommender):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class DrawsLate(Recommender):
    """Initialises weights after set-up, when ranks have drawn different numbers of random numbers for their shards."""

    def on_train_start(self) -> None:
        torch.manual_seed(self.global_rank)
        torch.nn.init.normal_(self.net.hidden[0].weight)


class TwoOptimizers(Recommender):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net.embeddings, self.net.hidden)]


class PartlyUnused(Recommender):
    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)


def _fit_with_ddp(balance: dict[str, Any], **options: Any) -> None:
    _fit(data=_data(8, balance=BalanceOptions(**balance), **options), strategy="ddp", max_steps=1)


def _fit_needing_rows() -> None:
    data = _data()
    data.feature_rows = {"history": 51}
    _fit(data=data)


def _resume_with_another_plan(**changed: int) -> None:
    data = _data(8)
    fit = trainer(devices=2, max_epochs=2, max_steps=1)
    fit.fit(Recommender(), data)
    fit.state.fn = "fit"
    data.load_state_dict({**data.state_dict(), "batches": 1, **changed})


def _fit_planned(plan: Any) -> None:
    module = Recommender()
    tables = {config.name: plan for config in module.net.embeddings.embedding_configs()}
    entry = construct_module_sharding_plan(module.net.embeddings, tables, local_size=2, world_size=2, device_type="cpu")
    if plan is COLUMNS:
        apply_optimizer_in_backward(RowWiseAdagrad, module.net.embeddings.parameters(), {"lr": 0.1})
    _fit(module, strategy=FreeScaleStrategy(plan=ShardingPlan({"net.embeddings": entry})))


def _fit_in_backward(optimizer: Any) -> None:
    module = Recommender()
    apply_optimizer_in_backward(optimizer, module.net.embeddings.parameters(), {"lr": 0.1})
    _fit(module)


COLUMNS = column_wise(ranks=[0, 1], compute_kernel="fused")
# accumulation and clipping: overlap/test_as_under_ddp
REFUSED_ON_RANKS: list[tuple[Callable[[], Any], str]] = [
    (lambda: _fit(data=_data(1)), "there is 1 sample for 2 ranks.*Use fewer ranks"),
    (lambda: _fit(data=_data(val_dataset=Samples(1))), r"val_dataset=...\).* 1 sample for 2 ranks"),
    (lambda: _fit(precision="64-true"), "precision='64-true'"),
    (lambda: _fit(overfit_batches=1), "overfit_batches=1.*limit_train_batches"),
    (lambda: _fit(callbacks=[ModelPruning("l1_unstructured")]), r"ModelPruning.*\['net.embeddings'\].*parameters_to_prune="),
    (lambda: _fit(callbacks=[StochasticWeightAveraging(0.1)]), "StochasticWeightAveraging"),
    (lambda: _fit(data=_data().train_dataloader()), "num_replicas=1.* 2 ranks.*datamodule=data"),
    (lambda: _fit(strategy=FreeScaleStrategy(model_averaging_period=2)), "model_averaging_period=2"),
    (lambda: _fit(Manual()), "automatic_optimization=False"),
    (lambda: _fit(TwoOptimizers()), "TwoOptimizers.configure_optimizers.*parameter group.*apply_optimizer_in_backward"),
    (lambda: _fit(With(torch.optim.RMSprop)), "RMSprop.*apply_optimizer_in_backward"),
    (lambda: _fit(With(lambda p: torch.optim.SGD(p, momentum=0.9))), "momentum=0.9.*momentum=0"),
    (lambda: _fit(With(lambda p: torch.optim.Adagrad(p, weight_decay=0.1))), "weight_decay=0.1.*weight_decay=0"),
    (lambda: _fit(With(lambda p: torch.optim.Adagrad(p, lr_decay=0.1))), "lr_decay=0.1.*lr_decay=0"),
    (
        lambda: _fit(With(torch.optim.Adam), strategy=FreeScaleStrategy(overlap="torchrec")),
        "Adam .*'net.embeddings.embeddings.item.weight'.*overlap=True.*RowWiseAdagrad",
    ),
    (_fit_needing_rows, "51 .*'history'.*num_embeddings=51"),
    (lambda: _fit(strategy=FreeScaleStrategy(plan=ShardingPlan({}))), r"'net.embeddings' with tables \['item', 'cat'\]"),
    (lambda: _fit_planned(table_row_wise(host_index=0)), "table 'item' .*'net.embeddings' sharding_type='table_row_wise'"),
    (lambda: _fit_planned(COLUMNS), "columns of table 'item'.*RowWiseAdagrad"),
    (lambda: _fit_in_backward(LAMB), "LAMB.*'net.embeddings.embeddings.item.weight'.*CPU"),
    (lambda: _fit_in_backward(torch.optim.NAdam), "NAdam"),
    (lambda: _fit_with_ddp({"assignment_mode": "slack"}), r"mode='slack'\).*strategy='freescale'"),
    (lambda: _fit_with_ddp({"assignment_mode": "best"}), "mode='best'"),
    (lambda: _fit_with_ddp({"max_tokens_per_rank": 1}), "max_tokens_per_rank=1"),
    (lambda: _fit_with_ddp({}, loss_reduction="target_mean"), "loss_reduction='target_mean'.*'unweighted'"),
    (lambda: _resume_with_another_plan(samples=7), "samples=7.*samples="),
    (lambda: _resume_with_another_plan(shuffle=0), "shuffle=0.*shuffle="),
    (lambda: _fit(DrawsLate()), r"\['net\.hidden\.0\.weight'\].*on_train_start"),
    (  # last: it fails during training, and DDP stays behind
        lambda: _fit(PartlyUnused()),
        r"'freescale_find_unused_parameters_true'.*FreeScaleStrategy\(find_unused_parameters=True",
    ),
]


def _messages() -> list[str]:
    found = []
    for fit, _ in REFUSED_ON_RANKS:
        try:
            fit()
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
        else:
            found.append("nothing")
    return found


def test_refused_before_training() -> None:
    for messages in run_distributed(_messages, 2):
        unlike = {
            pattern: message
            for (_, pattern), message in zip(REFUSED_ON_RANKS, messages)
            if not re.search(pattern, message, re.DOTALL) or "meta" in message
        }
        assert not unlike


def test_what_needs_no_ranks_is_refused_before_they_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(_SubprocessScriptLauncher, "_call_children_scripts", started.append)
    with pytest.raises(ValueError, match="automatic_optimization=False"):
        trainer(devices=2).fit(Manual(), _data())
    assert started == []


def _accepted() -> bool:
    """Fit what is accepted, and a module whose optimizer was refused before; return whether it kept its weights."""
    _fit_with_ddp({"assignment_mode": "slack"}, loss_reduction="unweighted")
    _fit(PartlyUnused(), strategy="freescale_find_unused_parameters_true")
    torch.manual_seed(0)
    module = With(torch.optim.RMSprop)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match="RMSprop"):
        _fit(module)
    kept = all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    module.make = torch.optim.SGD
    _fit(module)
    return kept and len(module.losses) > 0


def _warnings_of_few_samples() -> list[str]:
    samples = Samples(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(data=_data(3), max_epochs=2)
        _fit(data=DataLoader(samples, 4, collate_fn=collate), use_distributed_sampler=True)
        _fit(data=_data(4))
        with pytest.raises(ValueError, match="drop_last=True leaves no step"):
            _fit(data=_data(3, drop_last=True))
        _fit(data=DataLoader(samples, 2, collate_fn=collate), use_distributed_sampler=True)
    return [str(each.message) for each in caught if "(batch_size=" in str(each.message)]


def test_a_batch_size_above_the_data_is_a_warning_before_training() -> None:
    assert run_distributed(_warnings_of_few_samples, 2) == [
        [
            "FreeScaleDataModule(batch_size=2): A step of 2 x 2 needs 4 samples, but the data set has only 3. Each step has "
            "all 3, 1 or 2 per rank. Pass a smaller batch_size",
            "DataLoader(batch_size=4) is above the samples of each rank, 2. Pass a smaller one",
        ],
        [],
    ]


def test_accepted_after_a_refused_fit() -> None:
    assert run_distributed(_accepted, 2) == [True, True]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"clip": "all"}, TypeError, "clip="),
        ({"shard": "kind_emb"}, TypeError, r"shard='kind_emb'.*\['kind_emb'\]"),
        *(({"target_bubble_reduction": target}, ValueError, f"_reduction={target}") for target in (0, -0.5, 1.5)),
        ({"overlp": True}, TypeError, "overlp=.* overlap="),
        ({"find_unused_params": True}, TypeError, "find_unused_params=.* find_unused_parameters="),
        ({"zzz": True}, TypeError, "zzz="),
        *(({name: object()}, ValueError, f"{name}=.*all ranks share") for name in ("process_group", "device_mesh")),
        ({"ids_of": dict, "overlap": False}, ValueError, "ids_of=.*overlap=False"),
        ({"split_backward": True, "overlap": False}, ValueError, "split_backward=True.*overlap=False"),
        ({"ids_of": "ids"}, TypeError, "ids_of='ids'"),
        ({"overlap": "tree"}, ValueError, "overlap='tree'.*'torchrec'"),
        ({"hot_rows": "all"}, ValueError, "hot_rows='all'.*'auto'"),
        ({"rerank_every_n_steps": 0}, ValueError, "rerank_every_n_steps=0"),
        ({"hot_rows": 0.5, "dedup": False}, ValueError, r"hot_rows=0\.5.*dedup=False"),
        ({"hot_rows": 0, "rerank_every_n_steps": 9}, ValueError, r"rerank_every_n_steps=9.*hot_rows=0\).*no effect"),
        ({"overlap": "torchrec", "hot_rows": 0}, ValueError, "hot_rows=0.*overlap='torchrec'.*no effect"),
        ({"overlap": "torchrec", "rerank_every_n_steps": 9}, ValueError, "rerank_every_n_steps=9.*overlap='torchrec'"),
        ({"overlap": "torchrec", "split_backward": True}, ValueError, "overlap='torchrec'"),
        ({"wire": {"rows": "int8"}}, ValueError, "wire={'rows': 'int8'}.*'bfloat16'"),
        ({"wire": "float16", "overlap": "torchrec"}, ValueError, "wire='float16'.*overlap='torchrec'"),
    ],
)
def test_refused_by_the_constructor(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FreeScaleStrategy(**options)


@pytest.mark.parametrize("options", [{"dedup": False}, {"dedup": False, "hot_rows": 0}, {"overlap": False, "hot_rows": 0.5}])
def test_accepted_by_the_constructor(options: dict[str, Any]) -> None:
    assert FreeScaleStrategy(**options).hot_rows_option == options.get("hot_rows", "auto")


def test_options_of_ddp() -> None:
    FreeScaleStrategy(find_unused_parameters=True, gradient_as_bucket_view=True, process_group_backend="gloo")
    with pytest.raises(ValueError, match="start_method='fork'"):
        refuse_ddp_options("fork")


def test_unweighted_scales_no_loss() -> None:
    for reduction, scaled in (("sample_mean", True), ("unweighted", False)):
        data = _data(60, balance=BalanceOptions(assignment_mode="free"), loss_reduction=reduction)
        sampler = data.sampler(0, 3)
        assert ({sampler.loss_weight(step) for step in range(len(sampler))} != {1.0}) == scaled


# -- Fabric, and the other namespaces of Lightning


def _fabric(strategy: Any) -> Any:
    return Fabric(accelerator="cpu", devices=1, strategy=strategy).strategy


def _lightning_fabric(strategy: Any) -> Any:
    import lightning_fabric

    return lightning_fabric.Fabric(accelerator="cpu", strategy=strategy)


def _pytorch_lightning(strategy: Any) -> Any:
    import pytorch_lightning

    return pytorch_lightning.Trainer(accelerator="cpu", strategy=strategy)


def _trainer(strategy: Any) -> Any:
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False).strategy


@pytest.mark.parametrize(
    ("make", "strategy", "message"),
    [
        (_lightning_fabric, lambda: "freescale", "import lightning as L"),
        (_lightning_fabric, FreeScaleFabricStrategy, "from lightning.fabric import Fabric, not lightning_fabric"),
        (_pytorch_lightning, lambda: "freescale", "import lightning as L"),
        (_pytorch_lightning, FreeScaleStrategy, "import lightning as L, not pytorch_lightning"),
        (_fabric, FreeScaleStrategy, "lightning_freescale.FreeScaleFabricStrategy"),
        (_trainer, FreeScaleFabricStrategy, "lightning.fabric"),
    ],
)
def test_the_other_libraries_refuse_it(
    make: Callable[[Any], Any], strategy: Callable[[], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero, "log", rank_zero.log)  # which the others' import replaces globally
    with pytest.raises(ValueError, match=message):
        make(strategy())


def test_its_name_is_registered() -> None:
    for strategy in ("freescale", "FreeScale", FreeScaleStrategy()):
        assert isinstance(_trainer(strategy), FreeScaleStrategy)
    for name, unused in (("freescale", False), ("freescale_find_unused_parameters_true", True)):
        strategy = _fabric(name)
        assert isinstance(strategy, FreeScaleFabricStrategy)
        assert strategy.ddp_options.get("find_unused_parameters", False) == unused


def test_the_data_module_refuses_a_trainer_of_pytorch_lightning() -> None:
    import pytorch_lightning

    trainer = pytorch_lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(TypeError, match=r"pytorch_lightning.*import lightning as L"):
        trainer.fit(pytorch_lightning.LightningModule(), datamodule=FreeScaleDataModule([0, 1, 2], lambda sample: 1))


def test_modules_of_pytorch_lightning_are_refused_as_the_docs_say() -> None:
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        pass

    with pytest.raises(TypeError, match=(said := "`model` must be a `LightningModule`")):
        trainer(devices=1).fit(Module(), _data())
    assert said in (DOCS / "limits.md").read_text()


# -- several ranks on one GPU


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NCCL error\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a000", 'process_group_backend="gloo"'),
        ("the store has closed", "^the store has closed$"),
    ],
)
def test_an_error_of_nccl_on_a_shared_gpu_names_the_fix(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(strategy: Any) -> None:
        raise dist.DistBackendError(text)

    monkeypatch.setattr(L.pytorch.strategies.DDPStrategy, "setup_environment", fail)
    strategy = FreeScaleStrategy(parallel_devices=[torch.device("cpu")], cluster_environment=LightningEnvironment())
    with pytest.raises(RuntimeError, match=message):
        strategy.setup_environment()
