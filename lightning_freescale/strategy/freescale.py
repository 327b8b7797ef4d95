"""The Lightning strategy: DDP for dense parameters, TorchRec for embedding tables, without changes to the LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_freescale._lightning.batch_in_parts import counting_all_samples, micro_batches_in, of_each_part
from lightning_freescale._lightning.loops import Trainer, TrainerFn, find_remote_last, reload_train_loader, weights_only_of_run
from lightning_freescale._lightning.profiler import log_scalars
from lightning_freescale._lightning.stop_points import SIGTERMException
from lightning_freescale._lightning.weight_averaging import postpone_copies
from lightning_freescale.balance import MicroBatches
from lightning_freescale.checkpoint.held_files import MANIFEST
from lightning_freescale.comm import ProcessGroupFreeScale
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.strategy.balance_monitor import BalanceMonitor
from lightning_freescale.strategy.checkpoint_files import CheckpointFiles
from lightning_freescale.strategy.checkpointing import UnshardedCheckpointStrategy
from lightning_freescale.strategy.clipping import TableClipping
from lightning_freescale.strategy.setup import set_up_tables
from lightning_freescale.strategy.tuning.tuner import Tuner, hold_micro_batches, settle_without_exchange
from lightning_freescale.strategy.validation import (
    refuse_accumulation,
    refuse_options,
    refuse_sampler,
    refuse_second_backward,
    refuse_unequal_parameters,
    refuse_unsupported,
    warn_of_few_samples,
    warn_of_loader,
)
from lightning_freescale.training.lookahead_loader import UNKNOWN, LookaheadLoader
from lightning_freescale.training.setup import collections_of, refuse_unknown_options

if TYPE_CHECKING:
    from lightning_freescale.embeddings.overlap import OverlapReport


class FreeScaleStrategy(UnshardedCheckpointStrategy):
    """Shards TorchRec embedding collections over all ranks and trains the dense parameters with DDP.

    The LightningModule does not change. Its ``configure_optimizers`` returns one optimizer for dense parameters and tables.
    Checkpoints have the format of the unsharded module. A module without embedding collections trains as with ``"ddp"``.

    Args:
        plan: TorchRec ``ShardingPlan`` for the collections, by their paths in the module, or a TorchRec planner that creates
            the plan. The default is TorchRec's planner, restricted to row-wise sharding.
        transport: how rows and ids are sent between GPUs, see :class:`lightning_freescale.comm.ProcessGroupFreeScaleOptions`.
        overlap: exchange the rows of embedding collections while the model computes. With False, the model waits for each
            exchange, with the same results. ``"torchrec"``: TorchRec's own exchange, without overlap, as a baseline. **Its
            results differ from the unsharded module** where TorchRec's do: for weights that the collection ignores,
            ``inverse_indices``, and several lookups in a step.
        dedup: send each row once per rank and step. Without it, results are bitwise those of plain TorchRec. With it, they
            differ by the order of summation.
        ids_of: a function that returns the ids which the model will look up in a batch: a ``KeyedJaggedTensor`` (for a
            plain embedding the tensor of ids), a list of them for several lookups in a step, or a mapping from paths of
            collections to either. It must not change the batch, which is as the loader returns it. For collections that it
            leaves out, the strategy searches the batch. Mispredicted ids are fetched again; results are unaffected. ``ids_of``
            takes precedence over a method ``embedding_ids(batch)`` of the LightningModule.
        shard: plain ``nn.Embedding`` and ``nn.EmbeddingBag`` modules to shard as well, by their paths in the LightningModule,
            such as ``["item_emb"]``. They are called and saved as before. ``"auto"`` shards all modules with at least a million
            values and logs those that cannot be sharded. The default is none.
        split_backward: with ``overlap``, compute the gradients of the dense weights last in backward, while the gradients of
            the rows are sent. It pays off if the dense gradients are small compared with the rows that the next batch waits
            for. Otherwise steps can become longer, because backward hides less of the all-reduce of the dense gradients. See
            :class:`lightning_freescale.embeddings.overlap.WeightGradientsLast`.
        hot_rows: which rows are hot. A hot row that several ranks of a node request crosses the network once per step, and so
            does the sum of its gradients in the node. All other rows are sent between their owner and every rank. ``"auto"``:
            the rows for which this is faster, by the measured costs of transfers within and between nodes. An int: this number
            of rows. A float: the rows that on average at least this share of a node's ranks requests. 0: none. It has an
            effect with several nodes of several ranks each, and with ``dedup``.
        rerank_every_n_steps: the number of steps after which hot rows are chosen again. Requests before the last choice have
            less weight. The first choices come sooner. Results differ between choices by the order of summation
            and, with 16-bit gradients on the wire, by one more rounding per node.
        wire: the type in which rows and gradients are sent, ``"float32"``, ``"bfloat16"`` or ``"float16"``, or a dict with the
            types of ``"rows"`` and ``"gradients"``. A 16-bit type halves the bytes. **It changes the results**, because every
            value is rounded, also the rows of evaluation. Use bfloat16 for gradients: float16 makes values below 3e-8 zero.
            Rows of tables with 16-bit weights are always sent as 16 bits, without rounding.
        target_bubble_reduction: enables the autopilot, which measures training steps until it has removed this share of the
            initial bubble time, or until no setting helps. It tries ``split_backward``, and ``micro_batches`` if
            ``FreeScaleDataModule(micro_batches="auto")`` allows it. The choice depends on measured time, so results of two runs
            may differ by the rounding of micro-batches. None disables the autopilot.
        checkpoint: the format of checkpoints. ``"single"``: rank 0 writes one ordinary file, like that of the unsharded
            module, one table after the other. ``"sharded"``: every rank writes its part of the tables to a folder on a file
            system that all ranks share; ``freescale consolidate`` converts the folder to an ordinary file. ``"async"``: the
            same folder, written while training continues. A step waits until the rank's part is in host memory, and until the
            previous checkpoint is complete. A replaced or removed checkpoint is kept until then. Write errors are raised at
            the next save or at the end of training. Any number of ranks can read every format, with any value of this option.
            Non-finite parameters are never saved: the strategy raises an error and keeps earlier checkpoints.
        **ddp_options: ``timeout`` applies to all process groups. Without it, the default group has Lightning's timeout, and
            the groups for rows, plans, measurements and checkpoints have five minutes. Other options are those of
            :class:`lightning.pytorch.strategies.DDPStrategy`; unknown ones are passed to ``DistributedDataParallel``.

    Attributes:
        overlap_report: how much of the exchange the last fit overlapped, available after the fit; None without overlap.

    Raises:
        ValueError: an option has an invalid value, or has no or a different effect beside another option.
        TypeError: ``ids_of`` is not callable, ``shard`` is not a list, or an option is unknown.
    """

    strategy_name = "freescale"
    weighs_loss = True
    """Whether the strategy scales each rank's loss by the weights of the sampler, see :meth:`BalancedSampler.loss_weight`."""

    def __init__(
        self,
        plan: Any = None,
        transport: str = "auto",
        overlap: bool | Literal["torchrec"] = True,
        dedup: bool = True,
        ids_of: Callable[[Any], Any] | None = None,
        shard: Sequence[str] | Literal["auto"] | None = None,
        split_backward: bool = False,
        hot_rows: Literal["auto"] | int | float = "auto",
        rerank_every_n_steps: int = 200,
        wire: str | Mapping[str, str] = "float32",
        target_bubble_reduction: float | None = None,
        checkpoint: Literal["single", "sharded", "async"] = "single",
        **ddp_options: Any,
    ) -> None:
        refuse_unknown_options(ddp_options, FreeScaleStrategy)
        refuse_options(checkpoint, target_bubble_reduction)
        super().__init__(CheckpointFiles(checkpoint), **ddp_options)
        self.set_options(plan, transport, overlap, dedup, ids_of, shard, split_backward, hot_rows, rerank_every_n_steps, wire)
        self.target_bubble_reduction = target_bubble_reduction
        self.timeline = Timeline()
        self.overlap_report: OverlapReport | None = None
        self._finds_collections: bool | None = None  # whether set-up has found collections; None outside of a run
        self._balance_monitor: BalanceMonitor | None = None
        self._tuner: Tuner | None = None
        self._clipping: TableClipping | None = None
        self._loss_weight, self._warned_of_loader = 1.0, False
        self._hot_rows_hooks: list[Callable[..., Any]] = []  # on_hot_rows_changed of the callbacks that have it
        self._hides_nothing = ""  # why compute hides no exchange; empty if it hides all

    def __repr__(self) -> str:
        # other libraries refuse the strategy in a message that contains this text
        return (
            "<FreeScaleStrategy, which works only with the Trainer of lightning.pytorch: import lightning as L, not "
            "pytorch_lightning. For Fabric use lightning_freescale.FreeScaleFabricStrategy>"
        )

    # -- hooks, in the order of Lightning's Strategy

    @override
    def check_before_launch(self, trainer: Trainer) -> None:
        find_remote_last(trainer, MANIFEST)
        try:
            if trainer.state.fn == TrainerFn.FITTING:
                refuse_unsupported(trainer)
        except ValueError as error:
            try:
                found = collections_of(self.lightning_module, self.shard, self.plan)
            except ValueError:
                return  # configure_model may create the tables; the set-up checks again
            if found:  # a module without collections trains as with "ddp"
                raise error from None

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        postpone_copies(self.trainer)

    @override
    def setup(self, trainer: Trainer) -> None:
        module, fitting = trainer.lightning_module, trainer.state.fn == TrainerFn.FITTING
        self.files.weights_only = weights_only_of_run()
        self.set_up_stopping(trainer)
        if fitting:
            self.chosen_settings = {}
            self._tuner = Tuner(trainer, self.timeline, self.group_timeout, self.at_teardown)
        self.set_up_saving(trainer)
        self.tables = self.overlap_report = None
        self._hides_nothing = ""
        if fitting or (self.groups is not None and self.groups.root is not module):
            self.groups = None  # otherwise a checkpoint after validate or test is still one of the previous fit
        found = collections_of(module, self.shard, self.plan, warn=True, advise="FreeScaleStrategy" if fitting else "")
        self._finds_collections = bool(found)
        if not found:
            self._hides_nothing = "the module has no embedding collection whose exchange they would hide"
            super().setup(trainer)
            return
        self.table_step = step = set_up_tables(self, trainer, found, self.timeline, fitting)
        if fitting and self._tuner is not None:
            by_torchrec = [collection.path for collection in step.plain]
            plain = f"TorchRec updates collections {by_torchrec} during backward" if by_torchrec else ""
            self._hides_nothing = self.no_overlap or plain
            if self._hides_nothing and settle_without_exchange(trainer.train_dataloader, self._hides_nothing):
                reload_train_loader(trainer)  # configure_optimizers has read the loader, so batches may be cut already
            if self.target_bubble_reduction is not None and self.overlap and step.overlapped:
                self._tuner.record_steps()
            self._clipping = TableClipping(trainer, step)
            self.at_teardown.enter_context(self._clipping.running())

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        step = self.table_step
        loss = closure_loss if self._loss_weight == 1.0 else closure_loss * self._loss_weight
        if step is None:
            return super().backward(loss, optimizer, *args, **kwargs)
        refuse_second_backward(step.update_due)
        if loss.requires_grad:
            loss.register_hook(step.follow_settings)  # called after on_before_backward
        return step.backward(partial(super().backward, loss, optimizer, *args, **kwargs), updates=not self.accumulating)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if (step := self.table_step) is not None:
            step.step_done()
            trainer: Any = self.trainer
            with self.timeline.span("host", "embeddings: logging"):
                due = (every := trainer.log_every_n_steps) and trainer.global_step % every == 0 and trainer.is_global_zero
                if due and (report := step.report_of_rank()) is not None:
                    log_scalars(trainer, report.scalars())
        return output

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.table_step is not None:
            batch = self.table_step.copied(batch)  # Lightning then finds it on the device
        return of_each_part(lambda part: super(FreeScaleStrategy, self).batch_to_device(part, device, dataloader_idx), batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = self.table_step
        if step is None:
            return super().training_step(*args, **kwargs)
        step.before_forward(args[0], updates=not self.accumulating)
        if self._hot_rows_hooks:
            for table, (rows, counts) in step.changed_hot_rows().items():
                for hook in self._hot_rows_hooks:
                    hook(self.trainer, self.lightning_module, table, rows, counts)
        with step.forward():
            output = super().training_step(*args, **kwargs)
        step.end_forward()
        return output

    @override
    def process_dataloader(self, dataloader: object) -> object:
        sampler: Any = getattr(dataloader, "sampler", None)
        refuse_sampler(sampler, self.world_size)
        # before the loader is read, and after checkpoints are loaded
        if self.target_bubble_reduction is not None and not self._hides_nothing and self.autopilot is None:
            hold_micro_batches(dataloader, self.chosen_settings.get("kept", {}))
        # configure_optimizers may read the number of steps, and thus the loader, before there are sharded tables
        found = self.restore_checkpoint_after_setup
        # padded data may use micro-batches without an exchange, because each micro-batch is padded by itself
        if self._hides_nothing and (found or not getattr(sampler, "may_pad", False)):
            settle_without_exchange(dataloader, self._hides_nothing)
        loader = super().process_dataloader(dataloader)
        if not (trainer := self.trainer).training:
            return loader
        warn_of_few_samples(loader)
        return LookaheadLoader(loader, lambda: trainer.num_training_batches) if self.overlap and found else loader

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        found = self._finds_collections
        return bool(collections_of(self.lightning_module, self.shard, self.plan)) if found is None else found

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # configure_model builds on the host, because tables must reach the device in shards only
        with torch.device("cpu"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def teardown(self) -> None:
        self.leave_fit()
        self._balance_monitor = self._tuner = self.table_step = self._clipping = self.autopilot = None
        self._finds_collections, self._warned_of_loader = None, False
        self.at_teardown.close()
        module = self.lightning_module
        unbuilt = module is not None and any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        if self.tables is None and not unbuilt:  # Lightning moves the module, and tensors on the meta device cannot move
            super().teardown()
            return
        if self.tables is not None and isinstance(self.tables.group, ProcessGroupFreeScale):
            self.tables.group.wait_for_pending_works()
        self.tear_down_but_module(layers_synced=self.groups is not None)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=str(cls.__doc__).splitlines()[0])

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        trainer, step = self.trainer, self.table_step
        if step is not None:
            refuse_unequal_parameters(self.model)
            # an inner fit, such as that of BatchSizeFinder, may have failed, or may have left a setting of a trial
            step.update_due, step.split_backward = False, self.split_backward
            callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
            self._hot_rows_hooks = [each.on_hot_rows_changed for each in callbacks if hasattr(each, "on_hot_rows_changed")]
        self.at_teardown.enter_context(micro_batches_in(trainer, None if step is None else step.take_loaded))
        assert self._tuner is not None
        self._balance_monitor = BalanceMonitor(trainer, self.timeline, self._tuner.group)
        self.at_teardown.enter_context(counting_all_samples(trainer))
        self.autopilot = self._tuner.start(step, self.target_bubble_reduction, self._hides_nothing, self.chosen_settings)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._tuner is not None:  # between steps of a fit
            if self.table_step is not None:
                self.table_step.end_backward()
            if self.autopilot is not None:
                self.autopilot.pause()
        self.drain()

    @override
    def on_train_end(self) -> None:
        self.look_for_notices()  # a failed rank does not join the collectives here; after them all ranks see the same notices
        super().on_train_end()
        self.finish_overlap()
        if self._balance_monitor is not None and self._tuner is not None:
            self._balance_monitor.end_training()
            self._tuner.end_training()
        self.stop_after_training()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        trainer, step, monitor, tuner = self.trainer, self.table_step, self._balance_monitor, self._tuner
        assert monitor is not None
        assert tuner is not None
        if step is not None:
            if step.plain:
                refuse_accumulation(trainer, step.plain, isinstance(batch, MicroBatches))
            if self._clipping is not None:
                self._clipping.start_batch()
            following = self._following_batch(trainer, batch)
            restart = batch_idx % trainer.accumulate_grad_batches == 0  # Lightning zeroes the dense gradients there
            step.start_batch(batch, following, comes_ahead=not self._warned_of_loader, restart=restart)
        self._loss_weight = monitor.start_step(batch_idx)
        tuner.start_step(monitor.sampler, batch_idx)
        monitor.observe_padding(batch_idx, batch)

    @override
    def on_exception(self, exception: BaseException) -> None:
        try:
            if isinstance(exception, SIGTERMException):  # raised on all ranks: keep the checkpoints of callbacks
                self.files.finish()
        finally:
            super().on_exception(exception)

    # -- for callbacks and users

    def finish_overlap(self) -> OverlapReport | None:
        """Apply pending updates, and return means over all ranks and steps of the overlap; None without overlap. Collective."""
        if self.table_step is not None and self.table_step.groups is not None:
            self.table_step.end_backward()
            self.overlap_report = self.table_step.report()
        return self.overlap_report

    def _following_batch(self, trainer: Trainer, batch: Any) -> Any:
        """Return the batch that follows ``batch``, or ENDED, or UNKNOWN. Call it once at the start of each batch."""
        loader: Any = trainer.train_dataloader
        if batch is None and self.table_step is not None:  # Lightning skips these, unless training_step takes the iterator
            self.table_step.give_up_lookahead("training_step takes the iterator of the loader: take the batch")
        if isinstance(loader, LookaheadLoader):
            return loader.start_batch()
        if self.overlap and self.engine is not None and not self._warned_of_loader:
            self._warned_of_loader = True
            warn_of_loader(loader)
        return UNKNOWN
