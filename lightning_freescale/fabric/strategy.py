"""FreeScaleFabricStrategy: DDP for dense parameters and TorchRec for embedding tables, in a loop over Lightning Fabric."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    lane_of_tables,
    new_table_step,
    refuse_ddp_options,
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
    """A strategy that shards TorchRec embedding collections over all ranks and trains the rest with DDP, for Lightning Fabric.

    Module, optimizer and loop are the same as with ``"ddp"``:

    - ``fabric.setup(model, optimizer)`` shards the tables. The optimizer updates dense parameters and tables.
    - Loaders of ``fabric.setup_dataloaders`` look one batch ahead.
    - ``fabric.save`` writes the checkpoint of the unsharded module.
    - A module without embedding collections trains as with ``"ddp"``.

    The tables are updated while backward runs. Every ``fabric.backward(loss)`` outside ``fabric.no_backward_sync(model)``
    therefore needs an ``optimizer.step()`` and an ``optimizer.zero_grad()``. A loop whose results would differ from ``"ddp"``
    raises an error. The loss is multiplied by the weight of the batch if the sampler is a
    :class:`~lightning_freescale.balance.BalancedSampler`.

    Args:
        plan: see :class:`lightning_freescale.FreeScaleStrategy`, as for ``transport``, ``overlap``, ``dedup``, ``ids_of``,
            ``shard``, ``split_backward``, ``hot_rows``, ``rerank_every_n_steps`` and ``wire``.
        clip_gradients: whether to allow ``fabric.clip_gradients`` over dense parameters and tables. Rows are then updated after
            all gradients are known, so less of the exchange is overlapped.
        **ddp_options: ``timeout`` applies to all process groups. By default, Lightning's timeout applies to the default group
            and five minutes to the groups for rows. Other options are those of
            :class:`lightning.fabric.strategies.DDPStrategy` and ``DistributedDataParallel``.

    Raises:
        ValueError: an option has an unknown value, or has no effect beside another option.
        TypeError: ``ids_of`` is not a function, ``shard`` is not a list, or an option is unknown or needs the Trainer.
    """

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
        clip_gradients: bool = False,
        **ddp_options: Any,
    ) -> None:
        with speaking_of_fabric():
            refuse_options_of_the_trainer(ddp_options)
            refuse_unknown_options(ddp_options, FreeScaleFabricStrategy)
            super().__init__(**ddp_options)
            refuse_ddp_options(*self.unsupported_options)
            self.set_options(
                plan, transport, overlap, dedup, ids_of, shard, split_backward, hot_rows, rerank_every_n_steps, wire
            )
        if clip_gradients and self.by_torchrec:
            raise ValueError(
                f"{_NAME}(overlap='torchrec', clip_gradients=True): TorchRec updates tables during backward, before their "
                "gradients could be clipped. Remove one of the two options"
            )
        self.clips_gradients = clip_gradients
        self.block_backward_sync(self._accumulating)
        self._module: nn.Module | None = None
        self._steps: LoopSteps | None = None
        self._clipping: JointClipping | None = None
        self._current: CurrentBatch | None = None

    def __repr__(self) -> str:
        # other packages refuse the strategy with a message that contains this text
        return f"<{_NAME}, which only lightning.fabric supports: from lightning.fabric import Fabric, not lightning_fabric>"

    # -- set-up

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(super().module_init_context(empty_init))
        stack.enter_context(torch.device("cpu"))  # only shards of the tables may be on the device
        return stack

    @override
    def module_to_device(self, module: nn.Module) -> None:
        with speaking_of_fabric():
            found = collections_of(module, self.shard, self.plan)
        if not found or module is self._module:  # otherwise, the set-up moves the dense parameters
            super().module_to_device(module)

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        with self.reporting_failures():
            found = self._find(module)
            if not found:
                return super().setup_module_and_optimizers(module, optimizers, scheduler)
            refuse_several_optimizers(optimizers)
            return self._set_up(module, found, optimizers[0]), optimizers, scheduler

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        with self.reporting_failures():
            found = self._find(module)
            return self._set_up(module, found, None) if found else super().setup_module(module)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if self.tables is not None:
            raise ValueError(
                "fabric.setup_optimizers(optimizer) was called for a module with sharded tables, which are sharded together "
                "with their optimizer. Call model, optimizer = fabric.setup(model, optimizer) instead"
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
                "fabric.backward(loss) was called for a module that was set up without its optimizer, so its embedding tables "
                "would not be updated. Call model, optimizer = fabric.setup(model, optimizer)"
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
                f"fabric.clip_gradients(norm_type={norm_type!r}): embedding tables support only the 2-norm. Remove norm_type"
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
        """Return the unsharded state dict on rank 0, and the dense part on other ranks. Collective, one table at a time."""
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
        """Return the state dict of the unsharded optimizer, complete on rank 0. Collective."""
        steps = self._steps
        if steps is None or optimizer is not steps.optimizer:
            return super().get_optimizer_state(optimizer)
        steps.step.count_updates()
        return steps.unsharded_state(super().get_optimizer_state(optimizer))

    # -- for users

    def finish_overlap(self) -> OverlapReport | None:
        """Apply all pending updates, and return the statistics of the overlap; None without overlap. Collective.

        The statistics are means over all ranks and steps.
        """
        return None if self._steps is None else self._steps.step.report()

    # -- parts of the set-up, in their order

    def _find(self, module: nn.Module) -> list[tuple[Collection, Any]]:
        with speaking_of_fabric():
            found = collections_of(module, self.shard, self.plan, warn=True, advise=_NAME)
        if found:
            refuse_module(module, found, self, self.tables)
        return found

    def _set_up(self, module: nn.Module, found: list[tuple[Collection, Any]], optimizer: Optimizer | None) -> nn.Module:
        from lightning_freescale.embeddings.parameter_groups import ParameterGroups

        groups = None
        with table_sharding(module, self.root_device, self, found) as sharding:
            if optimizer is not None:
                sharding.adopt(optimizer)
                with speaking_of_fabric():
                    groups = ParameterGroups(optimizer, sharding)
            tables = shard_tables(sharding, groups, lane_of_tables(self), self)
        self.tables, self._module = tables, module
        module.to(self.root_device)
        wrapped = wrap_dense(module, tables.names_in_module(), self.ddp_device_ids, self)
        step = new_table_step(self, _NAME, tables, module, groups, farewell=False, hold_gradients=self.clips_gradients)
        self.table_step = step
        if step.engine is not None:  # Fabric has no hook at the end of a loop
            weakref.finalize(self, step.engine.close, farewell=False).atexit = False
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
            # copy the batch before Fabric moves it, so that the engine and the lookups use the same ids
            current.batch = self.batch_to_device(self._steps.step.copied(current.batch))
        handed, self._current = current.batch, current
        # keep a shallow copy, because the loop may pop ids from the batch before the strategy reads them
        current.batch = handed.copy() if type(handed) in (dict, list) else handed
        if self._steps is not None:
            self._steps.current = current
        return handed

    @contextmanager
    def _accumulating(self, module: nn.Module) -> Iterator[None]:
        steps = self._steps if self._is_sharded(module) else None
        with (
            nullcontext() if steps is None else steps.accumulating(),
            module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext(),
        ):
            yield

    def _is_sharded(self, module: nn.Module) -> bool:
        return self._module is not None and self._module in (module, getattr(module, "module", None))

    def _joint_clipping(self, optimizer: Optimizer) -> JointClipping | None:
        clips = self._clipping is not None and self._steps is not None and optimizer is self._steps.optimizer
        return self._clipping if self._clipping is not None and clips and self._clipping.tables() else None


_CLIP = f"Call fabric.clip_gradients(model, optimizer, ...), with {_NAME}(clip_gradients=True)"
_NOT_HELD = (
    "fabric.clip_gradients(...): the gradients of the embedding tables do not exist any more. Pass "
    f"{_NAME}(clip_gradients=True), and clip between fabric.backward(loss) and optimizer.step() of a step that updates"
)
