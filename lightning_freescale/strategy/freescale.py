"""FreeScaleStrategy: DDP for the dense part, TorchRec for the embedding tables, for LightningModules that stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_freescale._lightning.batch_in_parts import micro_batches_in, of_each_part
from lightning_freescale._lightning.loops import (
    Trainer,
    TrainerFn,
    after_evaluation_batches,
    optimizers_to_device,
    reload_train_loader,
    weights_only_of_run,
)
from lightning_freescale._lightning.stages import stages_on
from lightning_freescale._lightning.stop_points import SIGTERMException
from lightning_freescale._lightning.weight_averaging import average_shards, averaging_callbacks, postpone_copies
from lightning_freescale.balance import MicroBatches
from lightning_freescale.comm import ProcessGroupFreeScale, ProcessGroupFreeScaleOptions
from lightning_freescale.profiling.recording.collectives import collectives_on
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.strategy.autopilot import Autopilot
from lightning_freescale.strategy.balance_monitor import BalanceMonitor, calibrated_data
from lightning_freescale.strategy.checkpoint_files import CheckpointFiles
from lightning_freescale.strategy.checkpointing import UnshardedCheckpointStrategy
from lightning_freescale.strategy.choosable_settings import (
    MICRO_BATCHES,
    SPLIT_BACKWARD,
    choosable,
    hold_micro_batches,
    may_be_padded,
    schedule_of,
    settle_without_exchange,
    tell_what_is_choosable,
)
from lightning_freescale.strategy.clipping import TableClipping, clip_options, refuse_clipping
from lightning_freescale.strategy.compute_times import ComputeTimes
from lightning_freescale.strategy.lookahead_loader import LookaheadLoader
from lightning_freescale.strategy.module_setup import (
    collections_of,
    embedding_group,
    levels_of,
    materialize,
    refuse_collections,
    sync_dense,
    tell_embeddings,
    tell_of_lazy_updates,
    tell_of_no_collection,
    wrap_dense,
)
from lightning_freescale.strategy.validation import (
    no_overlap_because,
    refuse_accumulation,
    refuse_averages,
    refuse_checkpoint,
    refuse_exchange,
    refuse_ids_of,
    refuse_options,
    refuse_sampler,
    refuse_second_backward,
    refuse_several_optimizers,
    refuse_shard,
    refuse_shared_gpu,
    refuse_split_backward,
    refuse_target,
    refuse_unequal_shapes,
    refuse_unknown_options,
)

if TYPE_CHECKING:
    from lightning_freescale.embeddings.collections import Collection
    from lightning_freescale.embeddings.optimizer import UpdateSettings
    from lightning_freescale.embeddings.overlap import OverlapEngine, OverlapReport
    from lightning_freescale.embeddings.shards import ShardedTables


class FreeScaleStrategy(UnshardedCheckpointStrategy):
    """Shards TorchRec embedding collections over all ranks and trains the rest with DDP.

    The LightningModule stays as it is: its ``configure_optimizers`` drives the dense parameters and the tables, checkpoints
    are those of the unsharded module. A module without embedding collections trains as with ``"ddp"``.

    Args:
        plan: TorchRec ``ShardingPlan`` for the collections, by their paths in the module, or a TorchRec planner that makes the
            plan. The default is TorchRec's own planner, restricted to row-wise sharding.
        transport: what moves rows and ids between GPUs, see :class:`lightning_freescale.comm.ProcessGroupFreeScaleOptions`.
        overlap: exchange the rows of embedding collections while the model computes. The numbers are the same without.
        dedup: send each row once per rank and step. Without it the numbers are bitwise those of plain TorchRec, with it they
            differ by the order of summation.
        ids_of: a function that tells the ids which the model will look up in a batch, of that batch as it comes out of the
            loader, before hooks change it and before it is on the device. It is called once for each batch (or micro-batch)
            but the first of an epoch, in the main process, and must leave the batch as it is. It returns the
            ``KeyedJaggedTensor`` (of an ``nn.Embedding`` the tensor), a list of them for several lookups in a step, or a
            mapping from paths of collections in the module to that; those it leaves out are looked for in the batch. Ids that
            turn out to be others are exchanged anew: the numbers are the same. It goes before a method ``embedding_ids`` of
            the LightningModule, which is asked in the same way.
        shard: plain ``nn.Embedding`` modules to shard as well, by their paths in the LightningModule, such as
            ``["item_emb"]``; they are called and saved as before. ``"auto"``: all with a million numbers or more, those that
            cannot be sharded are told. By default none.
        split_backward: with ``overlap``, have backward compute the gradients of the dense weights last, while the gradients of
            the rows travel. Each rank's gradients are the same to the bit. Costs memory: the linear layers' inputs and the
            gradients of their outputs are held until then. See
            :class:`lightning_freescale.embeddings.overlap.WeightGradientsLast`.
        exchange: which way rows and gradients take. ``"flat"``: from the owners to every rank, and back.
            ``"two_level"``: what several ranks of a node need crosses the network once, and its gradients are added up in the
            node before they do. Pays with several nodes of several ranks each, where the network between nodes is slower than
            what connects the ranks of one; with one node, or one rank each, it is ``"flat"``, after a notice. ``"torchrec"``:
            TorchRec's own exchange, without overlap, as a baseline for measurements. **It computes other numbers than the
            unsharded module** where TorchRec does: a lookup with weights that the collection ignores, with
            ``inverse_indices``, of a feature that a mean and a sum table share, or several times in a step.
        target_bubble_reduction: the autopilot: choose settings by measurement while training, until this share of the bubble at
            the beginning is gone or nothing helps. It tries ``split_backward``, and ``micro_batches`` where
            ``FreeScaleDataModule(micro_batches="auto")`` allows it, one at a time, and keeps what makes steps quicker. Which
            samples a step has, tables, optimizer states and checkpoints are not touched; the run depends on the clock, to the
            rounding of micro-batches. None for no autopilot.
        checkpoint: how checkpoints are saved. ``"single"``: rank 0 writes one ordinary file, as that of the unsharded module,
            one table after the other. ``"sharded"``: every rank writes its part of the tables to a folder, on a file system
            that all ranks share; ``freescale consolidate`` converts the folder to the ordinary file. ``"async"``: the same
            folder, written while training continues. A step then waits until its rank's part has been copied to host memory,
            and until the previous checkpoint is complete. A replaced or removed checkpoint stays until then. An error in
            writing is raised at the next save, or at the end of training. Every kind is read on any number of ranks,
            whatever is set here. Parameters that are infinite or not a number are never saved: that is an error, and
            earlier checkpoints stay as they were.
        **ddp_options: ``timeout`` is that of all process groups; without it, the default group has Lightning's, and those for
            rows, plans and measurements have five minutes. Others are as in
            :class:`lightning.pytorch.strategies.DDPStrategy`; those it does not know go to ``DistributedDataParallel`` for the
            dense part.

    Attributes:
        overlap_report: what the overlap was worth in the last fit, once it has ended; None without overlap.

    Raises:
        ValueError: ``target_bubble_reduction`` is no share, there is no such transport, exchange or checkpoint, or an option
            would have no effect, or another one, beside another.
        TypeError: ``ids_of`` is no function, ``shard`` no list, or there is no such option.
    """

    strategy_name = "freescale"
    weighs_loss = True
    """Scales each rank's loss by the weights of the sampler, see :meth:`BalancedSampler.loss_weight`."""

    def __init__(
        self,
        plan: Any = None,
        transport: str = "auto",
        overlap: bool = True,
        dedup: bool = True,
        ids_of: Callable[[Any], Any] | None = None,
        shard: Sequence[str] | Literal["auto"] | None = None,
        split_backward: bool = False,
        exchange: Literal["flat", "two_level", "torchrec"] = "flat",
        target_bubble_reduction: float | None = None,
        checkpoint: Literal["single", "sharded", "async"] = "single",
        **ddp_options: Any,
    ) -> None:
        refuse_unknown_options(ddp_options, FreeScaleStrategy)
        refuse_checkpoint(checkpoint)
        super().__init__(CheckpointFiles(checkpoint), **ddp_options)
        refuse_exchange(exchange, dedup)
        why_not = no_overlap_because(overlap, exchange)
        refuse_ids_of(ids_of, why_not)
        refuse_split_backward(split_backward, why_not)
        refuse_shard(shard)
        refuse_target(target_bubble_reduction)
        self.target_bubble_reduction = target_bubble_reduction
        self.plan, self.split_backward, self.exchange = plan, split_backward, exchange
        self.transport = ProcessGroupFreeScaleOptions(transport).transport
        self.overlap, self.dedup = not why_not, dedup
        self.ids_of, self.shard = ids_of, shard
        self.timeline = Timeline()
        self.overlap_report: OverlapReport | None = None
        self._balance_monitor: BalanceMonitor | None = None
        self._monitor_group: dist.ProcessGroup | None = None
        self._clipping: TableClipping | None = None
        self._loss_weight = 1.0
        self._settings: dict[str, UpdateSettings] = {}  # what the tables are updated with in the current step
        self._hides_nothing = ""  # why no exchange is hidden behind compute, if none is
        self._accumulating = self._update_due = False

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register as ``"freescale"`` unless somebody else has that name."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=str(cls.__doc__).splitlines()[0])

    def __repr__(self) -> str:
        # others refuse it in a message with this in its place
        return (
            "<FreeScaleStrategy, which only the Trainer of lightning.pytorch takes: import lightning as L, not "
            "pytorch_lightning; Fabric takes lightning_freescale.FreeScaleFabricStrategy>"
        )

    # -- set-up

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # configure_model builds on the host: tables must reach the device in shards only
        with torch.device("cpu"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup_environment(self) -> None:
        try:
            super().setup_environment()
        except RuntimeError as error:
            refuse_shared_gpu(error)
            raise
        assert self.lightning_module is not None
        postpone_copies(self.lightning_module.trainer)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return bool(collections_of(self.lightning_module, self.shard))

    @override
    def setup(self, trainer: Trainer) -> None:
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        assert module is not None
        assert self.accelerator is not None
        self.files.weights_only = weights_only_of_run()
        self.set_up_stopping(trainer)
        if fitting and dist.is_initialized() and self.world_size > 1:
            # not where training starts: a hook of the user's that fails there would leave the others waiting here
            self._monitor_group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=self.group_timeout))
            self.at_teardown.callback(dist.destroy_process_group, self._monitor_group)
        if fitting and calibrated_data(trainer) is not None:
            self._record_steps()
        self.set_up_saving(trainer)
        self.tables = self.overlap_report = None
        self._hides_nothing = ""
        if fitting:
            self.chosen_settings = {}
        if fitting or self.groups is None or self.groups.root is not module:
            self.groups = None  # else a checkpoint after validate or test still is one of the fit before
        found = collections_of(module, self.shard, warn=True)
        if fitting:
            tell_embeddings(module, self.shard, found)
        if not found:
            tell_of_no_collection()
            self._hides_nothing = "the module has no embedding collection whose exchange they would hide"
            super().setup(trainer)
            return
        refuse_collections(trainer, found, self.root_device, fitting, self._by_torchrec)
        refuse_options(*self.unsupported_options)
        self.accelerator.setup(trainer)
        materialize(module, self.root_device, leave={child for _, held in found for child in held.modules()})
        if fitting:
            self.apply_layer_sync(module)
        self.tables = self._shard(trainer, module, found, fitting)
        self._wrap(module.to(self.root_device), self.tables, fitting)
        if fitting:
            self._average(trainer, self.tables)
        self.engine = self._new_engine(trainer, self.tables, fitting)
        if fitting:
            self._start_overlap(trainer)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            refuse_several_optimizers(error, trainer.lightning_module)
            raise

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):  # all ranks are here, and what a callback has saved is to be kept
            self.files.finish()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self.leave_fit()
        self._balance_monitor = self.engine = self.overlap_controller = self._clipping = self.autopilot = None
        self._monitor_group = None
        self.at_teardown.close()
        if self.tables is None:
            super().teardown()
            return
        if isinstance(self.tables.group, ProcessGroupFreeScale):
            self.tables.group.wait_for_pending_works()
        # Not the base class's: it moves the whole module to the CPU, which shards in FBGEMM's kernels do not survive.
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.model = self.lightning_module
        if self.model is not None and self.groups is not None:
            self.model = self.revert_layer_sync(self.model)
        optimizers_to_device(self.optimizers, torch.device("cpu"))
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- steps

    @override
    def process_dataloader(self, dataloader: object) -> object:
        refuse_sampler(getattr(dataloader, "sampler", None), self.world_size)
        # before anybody reads it, and after checkpoints are read
        if self.target_bubble_reduction is not None and not self._hides_nothing and self.autopilot is None:
            hold_micro_batches(dataloader, self.chosen_settings.get("kept", {}))
        module = self.lightning_module
        # not by the sharded tables: configure_optimizers may ask for the number of steps, and so for the loader, before them
        found = collections_of(module, self.shard)
        if found or not may_be_padded(dataloader):
            settle_without_exchange(dataloader, self._hides_nothing)
        loader = super().process_dataloader(dataloader)
        if not self.overlap or not found:
            return loader
        assert module is not None
        trainer = module.trainer
        return LookaheadLoader(loader, lambda: trainer.num_training_batches) if trainer.training else loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.overlap_controller is not None:
            batch = self.overlap_controller.copied(batch)  # what follows finds it on the device
        return of_each_part(lambda part: super(FreeScaleStrategy, self).batch_to_device(part, device, dataloader_idx), batch)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        self._update_due = False
        trainer = self.lightning_module.trainer
        controller = self.overlap_controller
        self.at_teardown.enter_context(micro_batches_in(trainer, None if controller is None else controller.take_loaded))
        self._balance_monitor = BalanceMonitor(trainer, self.timeline, self._monitor_group, self._new_autopilot)
        self.autopilot = self._balance_monitor.autopilot
        self.at_teardown.callback(self._balance_monitor.stop)

    @override
    def on_train_end(self) -> None:
        self.look_for_notices()  # what one rank tells before the collectives here, all hear behind them
        super().on_train_end()
        self.finish_overlap()
        if self._balance_monitor is not None:
            self._balance_monitor.end_training()
        self.stop_after_training()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.lightning_module is not None
        if self.tables is not None:
            overlapped = self._overlapped()
            plain = [collection for collection, _ in self.tables.modules if collection.path not in overlapped]
            paths = [collection.path for collection in plain]
            refuse_accumulation(self.lightning_module.trainer, paths, isinstance(batch, MicroBatches))
            if self._clipping is not None:
                self._clipping.start_batch(plain)
        if self.overlap_controller is not None:
            self.overlap_controller.start_batch(self.lightning_module.trainer.train_dataloader, batch, batch_idx)
        assert self._balance_monitor is not None
        self._loss_weight = self._balance_monitor.start_step(batch_idx, batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        controller = self.overlap_controller
        if self.tables is not None and self.groups is not None:
            with self.timeline.span("host", "embeddings: before the step"):
                self._settings = settings = self.groups.settings()
                self.tables.prepare_update(settings, skip=self._overlapped())
                if controller is not None:
                    controller.before_forward(args[0], not self._accumulating, settings, self.groups.step)
        with nullcontext() if controller is None else controller.forward():
            output = super().training_step(*args, **kwargs)
        if controller is not None:
            with self.timeline.span("host", "embeddings: ids of the next step"):
                controller.after_forward()
        return output

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        # entered for batches and micro-batches that no optimizer step follows
        outer, self._accumulating = self._accumulating, True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._accumulating = outer

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.tables is not None:
            refuse_second_backward(self._update_due)
            self._update_due = not self._accumulating
        self.gradients_wait = self._accumulating
        loss = closure_loss if self._loss_weight == 1.0 else closure_loss * self._loss_weight
        if self.engine is not None and loss.requires_grad:
            loss.register_hook(self._follow_settings)  # called behind on_before_backward
        try:
            with nullcontext() if self.overlap_controller is None else self.overlap_controller.backward():
                scaled = super().backward(loss, optimizer, *args, **kwargs)
            self._end_backward()
        except RuntimeError:
            # DDP fails when a rank has gone; the exchange may know why it has
            if self.overlap_controller is not None:
                self.overlap_controller.engine.raise_errors()
            raise
        return scaled

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._end_backward()  # again, for a training_step that returned None
        if self.overlap_controller is not None:
            self.overlap_controller.engine.apply_gradients()
        if self.groups is not None and self.tables is not None:
            if self._update_due:
                self.groups.refuse_late_changes(self._settings)
            self.groups.count_step(self.tables.idle_tables(self._update_due, self._overlapped()))
        self._update_due = self.gradients_wait = False
        if self.overlap_controller is not None:
            with self.timeline.span("host", "embeddings: logging"):
                self.overlap_controller.log_step()
        return output

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._end_backward()
        self.drain()
        if self._balance_monitor is not None:
            self._balance_monitor.pause()

    # -- what ranks tell each other

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # Lightning truncates the mean of integers, such as the numbers of samples that weigh what ranks have logged
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and str(reduce_op).lower() in ("avg", "mean"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        refuse_unequal_shapes(tensor, group)
        return super().all_gather(tensor, group, sync_grads)

    # -- for callbacks and users

    def finish_overlap(self) -> OverlapReport | None:
        """Bring the tables up to date, and return what the overlap was worth: means over all ranks and steps. Collective.

        None without overlap.
        """
        if self.overlap_controller is not None:
            self._end_backward()
            self.drain()
            self.count_updates()
            self.overlap_report = self.overlap_controller.report() if self.overlap else None
        return self.overlap_report

    # -- parts of the set-up, in their order

    def _shard(self, trainer: Trainer, module: nn.Module, found: list[tuple[Collection, Any]], fitting: bool) -> ShardedTables:
        from lightning_freescale.embeddings.parameter_groups import ParameterGroups
        from lightning_freescale.embeddings.sharding import TableSharding
        from lightning_freescale.embeddings.shards import ShardedTables

        earlier = ShardedTables.from_collections(found)
        if earlier is not None and not fitting and earlier.device == self.root_device:
            return earlier
        sharding = TableSharding(module, self.root_device, not self._by_torchrec, {held for c, held in found if c.embedding})
        try:
            optimizers = sharding.in_backward
            if fitting:
                self.setup_optimizers(trainer)  # over blueprints: configure_optimizers is called once, before sharding
                self.groups = ParameterGroups(self.optimizers[0], sharding)
                optimizers = self.groups.optimizers
                tell_of_lazy_updates(optimizers)
                plain = [each for each, _ in found if self._by_torchrec or each.managed]
                refuse_clipping(trainer, plain, optimizers)
            return sharding.shard(
                group=embedding_group(earlier, self.transport, self.root_device, self.group_timeout),
                local_world_size=self.num_processes,
                plan=self.plan,
                optimizers=optimizers,
            )
        except BaseException:
            sharding.restore()
            self.optimizers = []  # their states may be those of blueprints, which teardown cannot move
            raise

    def _wrap(self, module: nn.Module, tables: ShardedTables, fitting: bool) -> None:
        """Wrap the LightningModule itself in DDP, without the tables."""
        names = tables.names_in_module()
        self.model = wrap_dense(module, names, self.determine_ddp_device_ids(), self.ddp_options) if fitting else module
        if isinstance(self.model, DistributedDataParallel):
            self.register_ddp_hooks()
        else:
            sync_dense(module, names)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    def _average(self, trainer: Trainer, tables: ShardedTables) -> None:
        from lightning_freescale.strategy.weight_averaging import ShardAverages, unfit_for_averages

        refuse_averages(trainer, unfit_for_averages(tables))
        for callback in averaging_callbacks(trainer):
            average_shards(callback, partial(ShardAverages, self, tables, callback.state_key))

    @property
    def _by_torchrec(self) -> bool:
        return self.exchange == "torchrec"

    def _new_engine(self, trainer: Trainer, tables: ShardedTables, fitting: bool) -> OverlapEngine | None:
        from lightning_freescale.embeddings.overlap import OverlapEngine

        if self._by_torchrec:
            return None
        clips: dict[str, Any] = {}
        if self.groups is not None and fitting:
            clips = clip_options(trainer, self.groups.optimizers)
        levels = levels_of(self.exchange, self.num_nodes, self.num_processes)
        nodes: dict[str, Any] = {"exchange": levels, "ranks_per_node": self.num_processes}
        engine = OverlapEngine(tables, self.dedup, self.group_timeout, self.transport, **clips, **nodes)
        self.at_teardown.callback(engine.close, farewell=not fitting)  # training ends with a report of all ranks
        self.at_teardown.enter_context(after_evaluation_batches(trainer, self.serve_evaluation))
        return engine

    def _start_overlap(self, trainer: Trainer) -> None:
        from lightning_freescale.strategy.overlap import OverlapController

        assert self.groups is not None
        engine, why_not = self.engine, no_overlap_because(self.overlap, self.exchange)
        if engine is not None:
            options = (self.ids_of, self.split_backward, self.overlap)
            self.overlap_controller = OverlapController(trainer, engine, self.timeline, *options)
            if not why_not and engine.plain:
                why_not = f"TorchRec updates collections {list(engine.plain)} during backward"
        self._hides_nothing = why_not
        if settle_without_exchange(trainer.train_dataloader, why_not):
            reload_train_loader(trainer)  # configure_optimizers has asked for it, and batches may have been cut already
        if self.target_bubble_reduction is not None and self.overlap and engine is not None and engine.modules:
            self._record_steps()
        self._clipping = TableClipping(trainer, self.groups, engine)
        self.at_teardown.enter_context(self._clipping.running())

    def _record_steps(self) -> None:
        if not self.timeline.enabled:  # else a profiler has seen to it
            self.timeline.enable(self.root_device)
            self.at_teardown.enter_context(stages_on(self.timeline, self))
            self.at_teardown.enter_context(collectives_on(self.timeline))

    def _new_autopilot(self, gather: Callable[[Any], list[Any]], times: ComputeTimes | None) -> Autopilot | None:
        assert self.lightning_module is not None
        trainer, target = self.lightning_module.trainer, self.target_bubble_reduction
        schedule, controller = schedule_of(trainer.train_dataloader), self.overlap_controller
        if target is None:
            if schedule is None or schedule.decided:
                return None
            counts = {MICRO_BATCHES: schedule.candidates}
            return Autopilot(trainer, counts, {MICRO_BATCHES: 1}, schedule=schedule, controller=controller, gather=gather)
        settings = choosable(self.overlap and bool(self._overlapped()), schedule, self._hides_nothing)
        tell_what_is_choosable(target, settings, self._hides_nothing)
        if not settings:
            return None
        now = {SPLIT_BACKWARD: self.split_backward, MICRO_BATCHES: 1 if schedule is None else schedule.chosen}
        autopilot = Autopilot(
            trainer,
            settings,
            {name: now[name] for name in settings},
            schedule=schedule,
            controller=controller,
            gather=gather,
            times=times,
            target=target,
        )
        autopilot.load_state_dict(self.chosen_settings)
        return autopilot

    # -- parts of a step

    def _overlapped(self) -> frozenset[str]:
        """Return the paths of the collections that TorchRec does not update during backward."""
        return frozenset(self.overlap_controller.engine.modules) if self.overlap_controller is not None else frozenset()

    def _follow_settings(self, _: Tensor) -> None:
        """Update tables with the options that the module has set since the step began, in training_step for example."""
        assert self.engine is not None
        assert self.groups is not None
        self._settings = self.engine.follow_settings(self._settings, self.groups.settings())

    def _end_backward(self) -> None:
        if self.overlap_controller is not None:
            with self.timeline.span("host", "embeddings: gradients handed over"):
                self.overlap_controller.end_backward()
