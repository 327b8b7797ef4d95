"""Set-up of a Trainer's run with sharded tables: check the run, shard the tables, wrap the rest, start the exchange."""

from __future__ import annotations

from collections.abc import Collection as Group
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale._lightning.loops import (
    Trainer,
    after_evaluation_batches,
    around_summaries,
    leaves_transfer_alone,
    optimizers_to_device,
)
from lightning_freescale._lightning.weight_averaging import average_shards, averaging_callbacks
from lightning_freescale.strategy.clipping import clip_options, refuse_clipping
from lightning_freescale.strategy.validation import refuse_averages, refuse_run
from lightning_freescale.training.setup import (
    lane_of_tables,
    new_table_step,
    refuse_ddp_options,
    shard_tables,
    sync_dense,
    table_sharding,
    wrap_dense,
)

if TYPE_CHECKING:
    from lightning_freescale.embeddings.collections import Collection
    from lightning_freescale.embeddings.shards import ShardedTables
    from lightning_freescale.profiling.recording.timeline import Timeline
    from lightning_freescale.strategy.checkpointing import UnshardedCheckpointStrategy
    from lightning_freescale.training.table_step import TableStep


def set_up_tables(
    strategy: UnshardedCheckpointStrategy,
    trainer: Trainer,
    found: list[tuple[Collection, Any]],
    timeline: Timeline,
    fitting: bool,
) -> TableStep:
    """Shard the collections ``found`` in the LightningModule, wrap the rest in DDP, and return the step of the tables.

    Collective. It replaces the set-up of DDPStrategy.
    """
    module, device = trainer.lightning_module, strategy.root_device
    assert strategy.accelerator is not None
    plain = [collection for collection, _ in found if strategy.by_torchrec or collection.managed]
    refuse_run(trainer, found, plain, device, fitting)
    refuse_ddp_options(*strategy.unsupported_options)
    strategy.accelerator.setup(trainer)
    _materialize(module, device, leave={child for _, held in found for child in held.modules()})
    if fitting:
        strategy.apply_layer_sync(module)
    strategy.tables = tables = _shard(strategy, trainer, found, plain, fitting)
    module.to(device)
    names = tables.names_in_module()
    if fitting:
        strategy.model = wrap_dense(module, names, strategy.determine_ddp_device_ids(), strategy)
        if isinstance(strategy.model, DistributedDataParallel):
            strategy.register_ddp_hooks()
    else:
        strategy.model = module
        sync_dense(module, names)
    strategy.setup_precision_plugin()
    if fitting:
        optimizers_to_device(strategy.optimizers, device)
        strategy.at_teardown.enter_context(around_summaries(trainer, partial(tables.shown_whole, module)))
    if fitting and (callbacks := averaging_callbacks(trainer)):
        from lightning_freescale.strategy.weight_averaging import ShardAverages, unfit_for_averages

        refuse_averages(trainer, unfit_for_averages(tables))
        for callback in callbacks:
            average_shards(callback, partial(ShardAverages, strategy, tables, callback.state_key))
    groups = strategy.groups if fitting else None
    # a single rank waits for no gradients. With these options, DDP reduces the gradients of parameters that a last micro-batch
    # does not use before its backward begins
    unused = any(strategy.ddp_options.get(name) for name in ("find_unused_parameters", "static_graph"))
    step = new_table_step(
        strategy,
        "FreeScaleStrategy",
        tables,
        module,
        groups,
        farewell=not fitting,  # training ends with a report of all ranks
        copies_early=leaves_transfer_alone(trainer),
        timeline=timeline,
        split_windows=not unused and strategy.world_size > 1,
        **(clip_options(trainer, groups.optimizers) if groups is not None else {}),
    )
    if step.engine is not None:
        strategy.at_teardown.enter_context(after_evaluation_batches(trainer, step.engine.serve_evaluation))
    return step


def _materialize(module: nn.Module, device: torch.device, leave: Group[nn.Module]) -> None:
    """Allocate and initialise parameters and buffers on the meta device, except in ``leave``: tables, initialised in shards."""
    for path, child in module.named_modules():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if child in leave or not any(tensor.is_meta for tensor in own):
            continue
        if not callable(getattr(child, "reset_parameters", None)):
            raise ValueError(
                f"module {path!r} ({type(child).__name__}) is on the meta device and has no method reset_parameters(). Add "
                "that method, or build the module on the CPU"
            )
        child.to_empty(device=device, recurse=False)
        child.reset_parameters()


def _shard(
    strategy: UnshardedCheckpointStrategy,
    trainer: Trainer,
    found: list[tuple[Collection, Any]],
    plain: Sequence[Collection],
    fitting: bool,
) -> ShardedTables:
    from lightning_freescale.embeddings.parameter_groups import ParameterGroups
    from lightning_freescale.embeddings.shards import ShardedTables

    earlier = ShardedTables(found) if all(hasattr(held, "freescale_sharding") for _, held in found) else None
    groups = None
    lane = lane_of_tables(strategy)
    usable = earlier is not None and earlier.device == strategy.root_device and (earlier.torchrec_group is lane or not plain)
    if earlier is not None and usable and not fitting:
        return earlier
    try:
        with table_sharding(trainer.lightning_module, strategy.root_device, strategy, found) as sharding:
            if fitting:
                strategy.setup_optimizers(trainer)  # over blueprints: configure_optimizers is called once, before sharding
                strategy.groups = groups = ParameterGroups(strategy.optimizers[0], sharding)
                if plain:
                    refuse_clipping(trainer, plain, groups.optimizers)
            return shard_tables(sharding, groups, lane, strategy)
    except BaseException:
        strategy.optimizers = []  # their states may belong to blueprints, which teardown cannot move
        raise
