"""What the strategy does with a module before it trains: find and check its collections, wrap the part that is not sharded."""

from __future__ import annotations

from collections.abc import Collection as Group
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale._lightning.loops import Trainer, rank_zero_info, rank_zero_warn
from lightning_freescale.comm import BACKEND, ProcessGroupFreeScale
from lightning_freescale.comm.options import LazyGlooOptions
from lightning_freescale.strategy.validation import refuse_accumulation, refuse_averages, refuse_unsupported

if TYPE_CHECKING:
    from lightning_freescale.embeddings.collections import Collection
    from lightning_freescale.embeddings.optimizer import TableOptimizer
    from lightning_freescale.embeddings.shards import ShardedTables


Shard = Sequence[str] | Literal["auto"] | None
"""Which plain ``nn.Embedding`` modules to shard, see :func:`.choose_embeddings`."""


def collections_of(module: nn.Module | None, shard: Shard, warn: bool = False) -> list[tuple[Collection, Any]]:
    """Return the embedding collections of a module, see :func:`.find_collections`; none without TorchRec.

    If asked to ``warn``, it warns of collections that cannot be sharded.

    Raises:
        ValueError: an ``nn.Embedding`` that ``shard`` names cannot be sharded.
        ModuleNotFoundError: ``shard`` asks for TorchRec's tables, and TorchRec is not there.
    """
    if module is None or (find_spec("torchrec") is None and not shard):
        return []
    from lightning_freescale.embeddings.collections import find_collections, unsupported_collections
    from lightning_freescale.embeddings.plain_embedding import choose_embeddings

    found = find_collections(module, set(choose_embeddings(module, shard).chosen.values()))
    for path in unsupported_collections(module, found) if warn else ():
        rank_zero_warn(f"embedding collection {path!r} is of a kind that cannot be sharded: it is replicated as with 'ddp'")
    return found


def tell_embeddings(
    module: nn.Module, shard: Shard, found: Sequence[tuple[Collection, Any]], strategy: str = "FreeScaleStrategy"
) -> None:
    """Say which large ``nn.Embedding`` modules are not sharded although they could be, or what ``shard="auto"`` does."""
    if find_spec("torchrec") is None:
        return
    from lightning_freescale.embeddings.plain_embedding import LARGE_EMBEDDING, choose_embeddings

    choice = choose_embeddings(module, shard)
    sizes = {path: f"{path!r} ({e.num_embeddings} x {e.embedding_dim})" for path, e in (choice.chosen | choice.left).items()}
    if choice.left:
        rank_zero_info(
            f"strategy 'freescale': nn.Embedding {', '.join(sizes.values())} is whole on every rank, and its dense gradient is "
            f"reduced in every step: {strategy}(shard={[*sizes]!r}), or shard='auto', shards it"
        )
    if shard == "auto":
        none = "" if any(c.embedding for c, _ in found) else f"finds no nn.Embedding of {LARGE_EMBEDDING} numbers to shard"
        taken = f"shards {', '.join(sizes.values())}" if sizes else none
        if taken:  # else they are sharded, by an earlier fit
            rank_zero_info(f"strategy 'freescale': shard='auto' {taken}")
        for reason in choice.unshardable.values():
            rank_zero_info(f"strategy 'freescale': shard='auto' leaves an nn.Embedding whole: {reason}")


def refuse_collections(
    trainer: Trainer, found: list[tuple[Collection, Any]], device: torch.device, fitting: bool, by_torchrec: bool
) -> None:
    """Check that a run with these collections will be exact, before anything is changed.

    Raises:
        ValueError: the data has more ids than a table has rows, a collection does not work on ``device``, or a fit asks for
            what does not go with tables that are updated during backward.
    """
    from lightning_freescale.embeddings.id_checks import check_num_embeddings
    from lightning_freescale.embeddings.managed_collision import refuse_device

    needed = getattr(getattr(trainer, "datamodule", None), "feature_rows", {})
    check_num_embeddings([collection for collection, _ in found], needed)
    for collection, held in found:
        if collection.managed:
            refuse_device(collection.path, held, device, fitting)
    if fitting:
        refuse_unsupported(trainer)
        reason = "managed collisions give its rows to other ids during training. Use a plain collection"
        refuse_averages(trainer, {collection.path: reason for collection, _ in found if collection.managed})
        refuse_accumulation(trainer, [c.path for c, _ in found if by_torchrec or c.managed])


def tell_of_lazy_updates(optimizers: Mapping[str, TableOptimizer]) -> None:
    """Tell of the tables, by key, that do not end up as the dense optimizer of the unsharded module would leave them."""
    lazy = sorted(key for key, optimizer in optimizers.items() if optimizer.moves_without_gradient)
    if lazy:
        kinds = " and ".join(sorted({optimizers[key].fused_class.__name__ for key in lazy}))
        rank_zero_info(
            f"strategy 'freescale': {kinds} updates only the rows of tables {lazy} that a step looks up, as TorchRec and "
            "torch.optim.SparseAdam do. Under 'ddp' the dense optimizer moves all other rows in every step, too: expect other "
            "weights there, unless the loss is over all rows of the table"
        )


def levels_of(exchange: str, num_nodes: int, ranks_per_node: int) -> str:
    """Return the exchange that was asked for, or the flat one where there is one level only."""
    if exchange == "two_level" and 1 in (num_nodes, ranks_per_node):
        rank_zero_info(
            f"strategy 'freescale': exchange='two_level' with num_nodes={num_nodes} and {ranks_per_node} ranks each is the "
            "flat exchange: it takes several of both"
        )
        return "flat"
    return exchange


def tell_of_no_collection() -> None:
    """Say that there is nothing to shard."""
    rank_zero_info("strategy 'freescale': no embedding collection to shard in the module, it trains as with 'ddp'")


def embedding_group(
    earlier: ShardedTables | None, transport: str, device: torch.device, timeout: timedelta | None
) -> dist.ProcessGroup:
    """Return the process group of TorchRec's own exchanges, if it fits that of ``earlier``; else creating it is collective.

    The default group stays as Lightning made it.
    """
    # training waits for these exchanges and nothing computes beside them: NCCL is faster then. The other transports are for
    # the overlapped exchange, whose collections have groups of their own
    native = transport == "auto" and device.type == "cuda"
    lane = LazyGlooOptions("native" if native else transport, name="embedding", priority=1)
    group = earlier.group if earlier is not None else None
    if not isinstance(group, ProcessGroupFreeScale) or group.options != lane:
        group = cast("dist.ProcessGroup", dist.new_group(backend=BACKEND, timeout=timeout, pg_options=lane))
    return group


def materialize(module: nn.Module, device: torch.device, leave: Group[nn.Module]) -> None:
    """Give parameters and buffers on the meta device memory on ``device``, and initialise them by ``reset_parameters``.

    The submodules in ``leave`` stay as they are; tables among them are initialised in shards.

    Raises:
        ValueError: a submodule on the meta device has no ``reset_parameters``.
    """
    for path, child in module.named_modules():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if child in leave or not any(tensor.is_meta for tensor in own):
            continue
        if not callable(getattr(child, "reset_parameters", None)):
            raise ValueError(
                f"module {path!r} ({type(child).__name__}) is on the meta device and has no reset_parameters() to initialise "
                "it: add that method, or build it on the CPU"
            )
        child.to_empty(device=device, recurse=False)
        child.reset_parameters()


def wrap_dense(module: nn.Module, sharded: Group[str], device_ids: list[int] | None, options: dict[str, Any]) -> nn.Module:
    """Wrap ``module`` into DistributedDataParallel on the default group, leaving out the parameters named ``sharded``.

    A module whose only trainable parameters are sharded is returned as it is.
    """
    if not any(p.requires_grad for name, p in module.named_parameters() if name not in sharded):
        return module
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(sharded))
    return DistributedDataParallel(module, device_ids=device_ids, **options)


def sync_dense(module: nn.Module, sharded: Group[str]) -> None:
    """Copy rank 0's dense parameters and buffers to all ranks, where no DistributedDataParallel does it. Collective."""
    group = dist.group.WORLD
    assert group is not None
    _sync_module_states(module, group, 250 * 1024 * 1024, 0, set(sharded))
