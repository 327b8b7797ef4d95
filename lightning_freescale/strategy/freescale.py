"""FreeScaleStrategy: DDP for the dense part, TorchRec for the embedding tables, for LightningModules that stay as they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_freescale._lightning.loops import (
    Trainer,
    TrainerFn,
    optimizers_to_device,
    rank_zero_info,
    rank_zero_warn,
    throttle_sigterm_broadcast,
)
from lightning_freescale._lightning.stages import stages_on
from lightning_freescale.checkpoint import random_state
from lightning_freescale.comm import BACKEND, FreeScaleGroup, LaneOptions
from lightning_freescale.profiling.recording.collectives import collectives_on
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.strategy.balance_monitor import BalanceMonitor, calibrated_data
from lightning_freescale.strategy.checkpointing import CheckpointedStrategy
from lightning_freescale.strategy.dense import materialize, sync_dense, wrap_dense
from lightning_freescale.strategy.lookahead_loader import LookaheadLoader
from lightning_freescale.strategy.validation import (
    refuse_accumulation,
    refuse_options,
    refuse_sampler,
    refuse_second_backward,
    refuse_unsupported,
)

if TYPE_CHECKING:
    from lightning_freescale.embeddings.overlap import OverlapReport
    from lightning_freescale.embeddings.shards import ShardedTables
    from lightning_freescale.strategy.overlap import OverlapController


class FreeScaleStrategy(CheckpointedStrategy):
    """Shards TorchRec embedding collections over all ranks and trains the rest with DDP.

    The LightningModule stays as it is: its ``configure_optimizers`` drives the dense parameters and the tables, checkpoints
    are those of the unsharded module. A module without embedding collections trains as with ``"ddp"``.

    Args:
        plan: TorchRec ``ShardingPlan`` for the collections, by their path in the module; planned if not given.
        planner: TorchRec planner to make the plan; by default TorchRec's own, held to row-wise sharding.
        transport: what moves rows and ids between GPUs, see :class:`lightning_freescale.comm.LaneOptions`.
        overlap: exchange the rows of EmbeddingCollections while the model computes. The numbers are the same without.
        dedup: with ``overlap``, send each row once per rank and step. Without it the numbers are bitwise those of plain
            TorchRec, with it they differ by the order of summation.
        sigterm_every_n_steps: how often the ranks tell each other of a SIGTERM. Lightning does it before every step.
        **ddp_options: as in :class:`lightning.pytorch.strategies.DDPStrategy`; those it does not know go to
            ``DistributedDataParallel`` for the dense part.
    """

    strategy_name = "freescale"
    weighs_loss = True
    """Scales each rank's loss by the weights of the sampler, see :meth:`BalancedSampler.loss_weight`."""

    def __init__(
        self,
        plan: Any = None,
        planner: Any = None,
        transport: str = "auto",
        overlap: bool = True,
        dedup: bool = True,
        sigterm_every_n_steps: int = 50,
        **ddp_options: Any,
    ) -> None:
        super().__init__(**ddp_options)
        if sigterm_every_n_steps < 1:
            raise ValueError(f"sigterm_every_n_steps={sigterm_every_n_steps!r}: pass a number of steps, at least 1")
        self.plan, self.planner, self.sigterm_every_n_steps = plan, planner, sigterm_every_n_steps
        self.transport, self.overlap, self.dedup = LaneOptions(transport).transport, overlap, dedup
        self.timeline, self._observing = Timeline(), ExitStack()
        self.overlapping: OverlapController | None = None
        self.overlap_report: OverlapReport | None = None
        self._watch: BalanceMonitor | None = None
        self._loss_weight = 1.0
        self._update_due = self._accumulating = False

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register as ``"freescale"`` unless somebody else has that name."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=str(cls.__doc__).splitlines()[0])

    # -- set-up

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # configure_model builds on the host: tables must reach the device in shards only
        with torch.device("cpu"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup_environment(self) -> None:
        # TorchRec asks this variable how many ranks share a node; Lightning's own launcher does not set it
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.num_processes))
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if fitting and calibrated_data(trainer) is not None:
            self._observe()
        assert module is not None
        assert self.accelerator is not None
        self.tables = self.overlap_report = None
        if fitting or self.groups is None or self.groups.root is not module:
            self.groups = None  # else a checkpoint after validate or test still is one of the fit before
        found, unsupported = _collections(module)
        for path in unsupported:
            rank_zero_warn(f"embedding collection {path!r} is of a kind that cannot be sharded: it is replicated as with 'ddp'")
        if not found:
            rank_zero_info("strategy 'freescale': no embedding collection to shard in the module, it trains as with 'ddp'")
            super().setup(trainer)
            return
        self._check(trainer, found, fitting)
        self.accelerator.setup(trainer)
        materialize(module, self.root_device, leave={child for _, held in found for child in held.modules()})
        if fitting and self._layer_sync:
            self._layer_sync.apply(module)
        self.tables = self._shard(trainer, module, fitting)
        self._wrap(module.to(self.root_device), fitting)
        if fitting and self.overlap:
            self.overlapping = self._overlap(trainer)

    def _observe(self) -> None:
        """Have the times of the steps on the timeline, unless a profiler has seen to it."""
        if not self.timeline.enabled:
            self.timeline.enable(self.root_device)
            self._observing.enter_context(stages_on(self.timeline, self))
            self._observing.enter_context(collectives_on(self.timeline))

    def _overlap(self, trainer: Trainer) -> OverlapController:
        from lightning_freescale.embeddings.overlap import OverlapEngine
        from lightning_freescale.strategy.overlap import OverlapController

        assert self.tables is not None
        return OverlapController(trainer, OverlapEngine(self.tables, self.dedup, self._timeout, self.transport), self.timeline)

    def _check(self, trainer: Trainer, found: list[Any], fitting: bool) -> None:
        from lightning_freescale.embeddings.id_checks import check_rows
        from lightning_freescale.embeddings.managed_collision import refuse_device

        check_rows([collection for collection, _ in found], getattr(getattr(trainer, "datamodule", None), "feature_rows", {}))
        for collection, held in found:
            refuse_device(collection, held, self.root_device, fitting)
        if fitting:
            refuse_unsupported(trainer)
            refuse_accumulation(trainer, [c.path for c, _ in found if not self.overlap or c.pooled or c.managed])
        refuse_options(self._start_method, self._model_averaging_period)

    def _shard(self, trainer: Trainer, module: nn.Module, fitting: bool) -> ShardedTables:
        from lightning_freescale.embeddings.parameter_groups import TableGroups
        from lightning_freescale.embeddings.sharding import TableSharding
        from lightning_freescale.embeddings.shards import ShardedTables

        earlier = ShardedTables.found_in(module)
        if earlier is not None and not fitting and earlier.device == self.root_device:
            return earlier
        sharding = TableSharding(module, self.root_device, self.overlap)
        try:
            optimizers = sharding.given
            if fitting:
                self.setup_optimizers(trainer)
                self.groups = TableGroups(
                    self.optimizers[0], module, sharding.parameters, optimizers, self.root_device, sharding.by_row
                )
                optimizers = self.groups.optimizers
            return sharding.shard(
                group=self._embedding_group(earlier),
                local_world_size=self.num_processes,
                plan=self.plan,
                planner=self.planner,
                optimizers=optimizers,
            )
        except BaseException:
            sharding.restore()
            raise

    def _embedding_group(self, earlier: ShardedTables | None) -> dist.ProcessGroup:
        """The embedding exchange has a group of its own; the default one stays as Lightning made it."""
        group = earlier.group if earlier is not None else None
        # training waits for these exchanges: NCCL is faster where nothing computes beside it
        native = self.transport == "auto" and self.root_device.type == "cuda"
        lane = LaneOptions("native" if native else self.transport, name="embedding", priority=1)
        if not isinstance(group, FreeScaleGroup) or group.options != lane:
            group = dist.new_group(backend=BACKEND, timeout=self._timeout, pg_options=lane)
        return group

    def _wrap(self, module: nn.Module, fitting: bool) -> None:
        from lightning_freescale.embeddings.id_remapping import held_by_torchrec

        assert self.tables is not None
        keys = [*(table.key for table in self.tables.tables), *held_by_torchrec(self.tables)]
        self.model = wrap_dense(module, keys, self.determine_ddp_device_ids(), self._ddp_kwargs) if fitting else module
        if isinstance(self.model, DistributedDataParallel):
            self._register_ddp_hooks()
        else:
            sync_dense(module, keys)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    @override
    def teardown(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        self._observing.close()
        if self.overlapping is not None:
            self.overlapping.engine.close()
            self.overlapping = None
        if self.tables is None:
            super().teardown()
            return
        if isinstance(self.tables.group, FreeScaleGroup):
            self.tables.group.wait_for_pending_works()
        # Not the base class's: it moves the whole module to the CPU, which shards in FBGEMM's kernels do not survive.
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.model = self.lightning_module
        if self._layer_sync and self.model is not None and self.groups is not None:
            self.model = self._layer_sync.revert(self.model)
        optimizers_to_device(self.optimizers, torch.device("cpu"))
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- steps

    @override
    def process_dataloader(self, dataloader: object) -> object:
        refuse_sampler(getattr(dataloader, "sampler", None), self.world_size)
        loader = super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None or not trainer.training or not self.overlap or self.tables is None:
            return loader
        return LookaheadLoader(loader, lambda: trainer.num_training_batches)

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        if self._random_states:
            random_state.set_random_state(self._random_states, self.root_device)
            self._random_states = []
        self._update_due = False
        trainer = self.lightning_module.trainer
        self._watch = BalanceMonitor(trainer, self.timeline, self._timeout)
        throttle_sigterm_broadcast(trainer, self.sigterm_every_n_steps, lambda: self.timeline.collective("sigterm"))

    @override
    def on_train_end(self) -> None:
        self.finish_overlap()
        if self._watch is not None:
            self._watch.end_training()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self.tables is not None:
            refuse_accumulation(trainer, self._updated_in_backward())
        if self.overlapping is not None:
            self.overlapping.start_batch(trainer.train_dataloader, batch, batch_idx)
        assert self._watch is not None
        self._loss_weight = self._watch.start_step(batch_idx)

    def _updated_in_backward(self) -> list[str]:
        """Collections that are left to TorchRec."""
        assert self.tables is not None
        overlapped = self.overlapping.engine.overlapped() if self.overlapping is not None else frozenset()
        return [collection.path for collection, _ in self.tables.modules if collection.path not in overlapped]

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        overlapping = self.overlapping
        if self.tables is not None and self.groups is not None:
            with self.timeline.span("host", "embeddings: before the step"):
                leave = overlapping.engine.overlapped() if overlapping is not None else ()
                self.tables.prepare_update(self.groups.learning_rate, self.groups.step, leave)
                if overlapping is not None:
                    overlapping.before_forward(not self._accumulating, self.groups.learning_rate, self.groups.step)
        output = super().training_step(*args, **kwargs)
        if overlapping is not None:
            with self.timeline.span("host", "embeddings: ids of the next step"):
                overlapping.after_forward(args)
        return output

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        # Lightning enters it for batches that no optimizer step follows
        self._accumulating = True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._accumulating = False

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.tables is not None:
            refuse_second_backward(self._update_due)
            self._update_due = not self._accumulating
        loss = closure_loss if self._loss_weight == 1.0 else closure_loss * self._loss_weight
        with self._explained():
            scaled = super().backward(loss, optimizer, *args, **kwargs)
            self._end_backward()
        return scaled

    @contextmanager
    def _explained(self) -> Generator[None, None, None]:
        """If DDP fails because a rank has gone, say why it has."""
        try:
            yield
        except RuntimeError:
            if self.overlapping is not None:
                self.overlapping.engine.raise_errors()
            raise

    def _end_backward(self) -> None:
        if self.overlapping is not None:
            with self.timeline.span("host", "embeddings: gradients handed over"):
                self.overlapping.engine.end_backward()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._end_backward()  # again, for a training_step that returned None
        self._update_due = False
        if self.groups is not None:
            self.groups.step += 1
        if self.overlapping is not None:
            with self.timeline.span("host", "embeddings: logging"):
                self.overlapping.log_step()
        return output

    def finish_overlap(self) -> OverlapReport | None:
        """At the end of training: bring the tables up to date, and say what the overlap was worth. Collective."""
        if self.overlapping is not None:
            self._end_backward()
            self.drain()
            self.overlap_report = self.overlapping.report()
        return self.overlap_report

    def drain(self) -> None:
        """Wait until every update of the steps so far is in the tables: before reading them by hand."""
        if self.overlapping is not None:
            self.overlapping.engine.drain()

    @contextmanager
    def writing_tables(self) -> Generator[None, None, None]:
        """Around writes to the tables by hand, on every rank: updates under way come first, rows fetched ahead are void."""
        with self.overlapping.engine.writing() if self.overlapping is not None else nullcontext():
            yield

    @override
    def on_validation_start(self) -> None:
        self._end_backward()
        self.drain()

    # -- checkpoints: one ordinary file, as if nothing were sharded

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return bool(_collections(self.lightning_module)[0])


def _collections(module: nn.Module | None) -> tuple[list[Any], list[str]]:
    """The embedding collections of a module, and the paths of those that cannot be sharded; none without TorchRec."""
    if module is None or find_spec("torchrec") is None:
        return [], []
    from lightning_freescale.embeddings.collections import find_collections, unsupported_collections

    return find_collections(module), unsupported_collections(module)
