"""FreeScaleFabricStrategy: DDP for the dense part, TorchRec for the embedding tables, in a loop over Lightning Fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_freescale._lightning.ddp import FabricDDPBase
from lightning_freescale._lightning.loops import optimizers_to_device
from lightning_freescale.fabric.loop_steps import CurrentBatch, HandingLoader, LoopSteps
from lightning_freescale.fabric.validation import (
    refuse_data,
    refuse_module,
    refuse_options_of_the_trainer,
    refuse_several_optimizers,
    refuse_shards_in,
    speaking_of_fabric,
)
from lightning_freescale.training.clipping import JointClipping
from lightning_freescale.training.lookahead_loader import LookaheadLoader
from lightning_freescale.training.setup import (
    TableStrategy,
    collections_of,
    new_table_step,
    refuse_ddp_options,
    refuse_shared_gpu,
    refuse_unknown_options,
    shard_tables,
    table_sharding,
    wrap_dense,
)

if TYPE_CHECKING:
    from lightning_freescale.embeddings.collections import Collection
    from lightning_freescale.embeddings.overlap import OverlapReport

_NAME = "FreeScaleFabricStrategy"


class FreeScaleFabricStrategy(TableStrategy, FabricDDPBase):
    """Shards TorchRec embedding collections over all ranks and trains the rest with DDP, in a loop over Lightning Fabric.

    Module, optimizer and loop stay as they are under ``"ddp"``: ``fabric.setup(model, optimizer)`` shards, and the optimizer
    drives the dense parameters and the tables; loaders of ``fabric.setup_dataloaders`` look one batch ahead; checkpoints of
    ``fabric.save`` are those of the unsharded module. A module without embedding collections trains as with ``"ddp"``.

    The tables are updated while backward runs. So every ``fabric.backward(loss)`` outside of ``fabric.no_backward_sync(model)``
    needs its ``optimizer.step()``, and that its ``optimizer.zero_grad()``; what would give other numbers than ``"ddp"`` is an
    error. The loss is multiplied by the weight that a :class:`~lightning_freescale.balance.BalancedSampler` has for the batch.

    Args:
        plan: as ``transport``, ``overlap``, ``dedup``, ``ids_of``, ``shard``, ``split_backward`` and ``exchange``, an option of
            :class:`lightning_freescale.FreeScaleStrategy`.
        clip_gradients: allow ``fabric.clip_gradients``, over dense part and tables together. No row is updated before all
            gradients are known then, so less of the exchange is hidden.
        **ddp_options: ``timeout`` is that of all process groups; without it, the default group has Lightning's, and those for
            rows have five minutes. Others are as in :class:`lightning.fabric.strategies.DDPStrategy`; those it does not know go
            to ``DistributedDataParallel`` for the dense part.

    Raises:
        ValueError: there is no such transport or exchange, or an option would have no effect beside another.
        TypeError: ``ids_of`` is no function, ``shard`` no list, or there is no such option, or only for the Trainer.
    """

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
        clip_gradients: bool = False,
        **ddp_options: Any,
    ) -> None:
        with speaking_of_fabric():
            refuse_options_of_the_trainer(ddp_options)
            refuse_unknown_options(ddp_options, FreeScaleFabricStrategy)
            super().__init__(**ddp_options)
            refuse_ddp_options(self.start_method)
            self.set_options(plan, transport, overlap, dedup, ids_of, shard, split_backward, exchange)
        if clip_gradients and exchange == "torchrec":
            raise ValueError(
                f"{_NAME}(exchange='torchrec', clip_gradients=True): TorchRec updates tables during backward, before their "
                "gradients could be clipped. Leave one of the two out"
            )
        self.clips_gradients = clip_gradients
        self.block_backward_sync(self._accumulating)
        self._module: nn.Module | None = None
        self._steps: LoopSteps | None = None
        self._clipping: JointClipping | None = None
        self._current: CurrentBatch | None = None
        self.at_teardown = ExitStack()

    def __repr__(self) -> str:
        # others refuse it in a message with this in its place
        return f"<{_NAME}, which only lightning.fabric takes: from lightning.fabric import Fabric, not lightning_fabric>"

    # -- set-up

    @override
    def setup_environment(self) -> None:
        try:
            super().setup_environment()
        except RuntimeError as error:
            with speaking_of_fabric():
                refuse_shared_gpu(error)
            raise

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(super().module_init_context(empty_init))
        stack.enter_context(torch.device("cpu"))  # tables must reach the device in shards only
        return stack

    @override
    def module_to_device(self, module: nn.Module) -> None:
        with speaking_of_fabric():
            found = collections_of(module, self.shard)
        if not found or module is self._module:  # else the set-up moves what is not sharded
            super().module_to_device(module)

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        found = self._find(module)
        if not found:
            return super().setup_module_and_optimizers(module, optimizers, scheduler)
        refuse_several_optimizers(optimizers)
        return self._set_up(module, found, optimizers[0]), optimizers, scheduler

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        found = self._find(module)
        return self._set_up(module, found, None) if found else super().setup_module(module)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if self.tables is not None:
            raise ValueError(
                "fabric.setup_optimizers(optimizer) beside a module with sharded tables: the tables are sharded together with "
                "the optimizer that drives them. Call model, optimizer = fabric.setup(model, optimizer), in place of both"
            )
        return super().setup_optimizer(optimizer)

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        refuse_data(dataloader, self.world_size)
        return HandingLoader(LookaheadLoader(dataloader) if self.overlap else dataloader, self._take)

    @override
    def teardown(self) -> None:
        self.at_teardown.close()
        super().teardown()

    # -- steps

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if self._current is not None and self._current.loss_weight != 1.0:
            tensor = tensor * self._current.loss_weight
        run = partial(super().backward, tensor, module, *args, **kwargs)
        if self._steps is not None:
            self._steps.backward(run)
        elif self.tables is not None:
            raise ValueError(
                "fabric.backward(loss) of a module that was set up without its optimizer: its embedding tables would stay as "
                "they are. Call model, optimizer = fabric.setup(model, optimizer)"
            )
        else:
            run()

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        run, steps = partial(super().optimizer_step, optimizer, **kwargs), self._steps
        return steps.optimizer_step(run) if steps is not None and optimizer is steps.optimizer else run()

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        joint = self._joint_clipping(optimizer)
        if joint is None:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        if norm_type != 2.0:
            raise ValueError(
                f"fabric.clip_gradients(norm_type={norm_type!r}): of embedding tables only the 2-norm is known. Leave it out"
            )
        with joint.exempt():
            checked = partial(torch.nn.utils.get_total_norm, error_if_nonfinite=True) if error_if_nonfinite else None
            return joint.by_norm(list(self.precision.main_params(optimizer)), max_norm, _NOT_HELD, checked)

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        joint = self._joint_clipping(optimizer)
        with nullcontext() if joint is None else joint.exempt():
            if joint is not None:
                joint.tables_by_value(clip_val, _NOT_HELD)
            super().clip_gradients_value(module, optimizer, clip_val)

    # -- checkpoints

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self.tables is not None:
            refuse_shards_in(state, self.tables)
        super().save_checkpoint(path, state, *args, **kwargs)

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the unsharded state dict on rank 0, one table gathered at a time, and the dense part on others. Collective."""
        if not self._is_sharded(module):
            return super().get_module_state_dict(module)
        from lightning_freescale.checkpoint.unsharded import module_state_dict

        self.drain()
        assert self.tables is not None
        return module_state_dict(self.tables, super().get_module_state_dict(module))

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        if not self._is_sharded(module):
            super().load_module_state_dict(module, state_dict, strict)
            return
        from lightning_freescale.checkpoint.unsharded import load_module_state_dict

        assert self._module is not None
        assert self.tables is not None
        with self.writing_tables():
            load_module_state_dict(self._module, self.tables, state_dict, strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict that the user's optimizer would have unsharded; whole on rank 0. Collective."""
        steps = self._steps
        if steps is None or optimizer is not steps.optimizer:
            return super().get_optimizer_state(optimizer)
        steps.step.count_updates()
        return steps.unsharded_state(super().get_optimizer_state(optimizer))

    # -- for users

    def finish_overlap(self) -> OverlapReport | None:
        """Bring the tables up to date, and return what the overlap was worth: means over all ranks and steps. Collective.

        None without overlap.
        """
        return None if self._steps is None else self._steps.step.report()

    # -- parts of the set-up, in their order

    def _find(self, module: nn.Module) -> list[tuple[Collection, Any]]:
        """Return the collections to shard, after all checks."""
        with speaking_of_fabric():
            found = collections_of(module, self.shard, warn=True, advise=_NAME)
        if found:
            refuse_module(module, found, self.root_device, self.updates_unscaled, self.precision.precision, self.tables)
        return found

    def _set_up(self, module: nn.Module, found: list[tuple[Collection, Any]], optimizer: Optimizer | None) -> nn.Module:
        from lightning_freescale.embeddings.parameter_groups import ParameterGroups

        groups = None
        with table_sharding(module, self.root_device, self, found) as sharding:
            if optimizer is not None:
                sharding.adopt(optimizer)
                with speaking_of_fabric():
                    groups = ParameterGroups(optimizer, sharding)
            tables = shard_tables(sharding, groups, None, self)
        self.tables, self._module = tables, module
        module.to(self.root_device)
        wrapped = wrap_dense(module, tables.names_in_module(), self.ddp_device_ids, self.ddp_options)
        step = new_table_step(self, _NAME, tables, module, groups, farewell=False, hold_gradients=self.clips_gradients)
        self.table_step = step
        if optimizer is None:
            return wrapped
        optimizers_to_device([optimizer], self.root_device)
        self._steps = LoopSteps(step, optimizer, wrapped)
        self._clipping = JointClipping(step, lambda: optimizer, _CLIP)
        self.at_teardown.enter_context(self._clipping.checking_torch())
        return wrapped

    # -- parts of a step

    def _take(self, current: CurrentBatch) -> Any:
        if isinstance(current.loader, LookaheadLoader):
            current.following = current.loader.start_batch()
        if self._steps is not None and self._steps.step.early_copy is not None:
            # on the device before Fabric moves it, so that the ids that the engine has are those that are looked up
            current.batch = self.batch_to_device(self._steps.step.copied(current.batch))
        handed, self._current = current.batch, current
        # its own list of what the batch holds: the loop may pop ids from the batch before they are looked for there
        current.batch = handed.copy() if type(handed) in (dict, list) else handed
        if self._steps is not None:
            self._steps.current = current
        return handed

    @contextmanager
    def _accumulating(self, module: nn.Module) -> Iterator[None]:
        sharded = self._steps is not None and self._is_sharded(module)
        plain = module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()
        with self._steps.accumulating(module) if self._steps is not None and sharded else plain:
            yield

    def _is_sharded(self, module: nn.Module) -> bool:
        return self._module is not None and self._module in (module, getattr(module, "module", None))

    def _joint_clipping(self, optimizer: Optimizer) -> JointClipping | None:
        """Return what clips dense part and tables together; None where the optimizer has no tables."""
        clips = self._clipping is not None and self._steps is not None and optimizer is self._steps.optimizer
        return self._clipping if self._clipping is not None and clips and self._clipping.tables() else None


_CLIP = f"Call fabric.clip_gradients(model, optimizer, ...), with {_NAME}(clip_gradients=True)"
_NOT_HELD = (
    "fabric.clip_gradients(...): the gradients of the embedding tables are not kept until here. Pass "
    f"{_NAME}(clip_gradients=True), and call it in steps that update, between fabric.backward(loss) and optimizer.step()"
)
