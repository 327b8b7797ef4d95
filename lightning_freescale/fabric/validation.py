"""Checks of a loop over Fabric: errors for settings that cannot be trained exactly, in the terms of Fabric."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_freescale.balance import BalancedSampler

if TYPE_CHECKING:
    from lightning_freescale._lightning.ddp import FabricDDPBase
    from lightning_freescale.embeddings.collections import Collection
    from lightning_freescale.embeddings.shards import ShardedTables

_OF_THE_TRAINER = {
    "target_bubble_reduction": "the autopilot measures the Trainer's steps. Set split_backward= yourself, or use L.Trainer",
    "micro_batches": "only the Trainer's loop divides batches. Use smaller batches within fabric.no_backward_sync(model)",
    "model_averaging_period": "sharded tables cannot differ between ranks. Remove the option",
}


def refuse_options_of_the_trainer(given: Iterable[str]) -> None:
    for option in given:
        if option in _OF_THE_TRAINER:
            raise TypeError(f"FreeScaleFabricStrategy({option}=...) is not available in Fabric: {_OF_THE_TRAINER[option]}")


def refuse_module(
    module: nn.Module, found: list[tuple[Collection, Any]], strategy: FabricDDPBase, earlier: ShardedTables | None
) -> None:
    """Raise ValueError if a module with the collections ``found`` would not be trained exactly, before any change to it."""
    from lightning_freescale.embeddings.managed_collision import refuse_device

    if earlier is not None or any(hasattr(held, "freescale_sharding") for _, held in found):
        raise ValueError(
            "fabric.setup(model): a module with embedding collections was set up before, and strategy 'freescale' trains only "
            "one. Put both into one module, or create a new module and a new Fabric"
        )
    if not strategy.updates_unscaled:
        raise ValueError(
            f"Fabric(precision={strategy.precision.precision!r}): sharded tables support only '32-true' and 'bf16-mixed'. "
            "Other precisions scale or convert the gradients of the tables. Use one of these two"
        )
    tables = {parameter for _, held in found for parameter in held.parameters()}
    if meta := [name for name, p in module.named_parameters() if p.is_meta and p not in tables]:
        raise ValueError(
            f"parameters {meta} are on the meta device, and the optimizer holds them. Create them in fabric.init_module(). "
            "Only embedding collections may be on the meta device"
        )
    for collection, held in found:
        if collection.managed:
            refuse_device(collection.path, held, strategy.root_device, True)


def refuse_several_optimizers(optimizers: Sequence[Any]) -> None:
    if len(optimizers) != 1:
        raise ValueError(
            f"fabric.setup(model, ...) with {len(optimizers)} optimizers: pass one optimizer, with a parameter group for each "
            "set of parameters. For tables that need another optimizer class, call "
            "torchrec.optim.apply_optimizer_in_backward before"
        )


def refuse_data(loader: Any, world_size: int) -> None:
    """Raise ValueError for a sampler that plans for other ranks or needs the Trainer."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, BalancedSampler):
        return
    if sampler.num_replicas != world_size:
        raise ValueError(
            f"the loader's BalancedSampler plans for num_replicas={sampler.num_replicas}, but Fabric has {world_size} ranks. "
            "Create it after fabric.launch() with num_replicas=fabric.world_size, rank=fabric.global_rank. With a "
            "FreeScaleDataModule, use data.sampler(fabric.global_rank, fabric.world_size)"
        )
    if max(sampler.micro_batches.candidates) > 1:
        raise ValueError(
            "FreeScaleDataModule(micro_batches=...) needs Trainer(strategy='freescale'), whose loop divides batches. In "
            "Fabric, use smaller batches within fabric.no_backward_sync(model)"
        )


def refuse_shards_in(state: Mapping[str, Any], tables: ShardedTables) -> None:
    """Raise ValueError for a module's own state dict, which holds only the shards of this rank."""
    rows = tables.state_dict_keys()
    shapes = {table.key: (table.rows, table.dim) for table in tables.tables}
    for name, value in state.items():
        held = value.items() if isinstance(value, Mapping) else ()
        for key, tensor in held:
            if key in rows and not (type(tensor) is Tensor and tuple(tensor.shape) == shapes[rows[key]]):
                raise ValueError(
                    f"fabric.save(path, {{{name!r}: model.state_dict()}}) would save only this rank's part of table {key!r}. "
                    f"Pass the module itself, {{{name!r}: model}}"
                )


@contextmanager
def speaking_of_fabric() -> Iterator[None]:
    """Replace the name of the Trainer's strategy by that of Fabric's in errors of shared code."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        error.args = tuple(
            arg.replace("FreeScaleStrategy(", "FreeScaleFabricStrategy(") if isinstance(arg, str) else arg for arg in error.args
        )
        raise
