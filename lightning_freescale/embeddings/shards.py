"""The sharded tables of a module: this rank's shards, their initial values and the settings of their updates."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.optim.fused import FusedOptimizerModule

from lightning_freescale.comm import ProcessGroupFreeScale
from lightning_freescale.comm.shared_lane import current_lane
from lightning_freescale.embeddings.collections import Collection, Table
from lightning_freescale.embeddings.id_checks import LookupChecks
from lightning_freescale.embeddings.optimizer import TableOptimizer, UpdateSettings
from lightning_freescale.embeddings.row_order import RowOrder

_BYTES_AT_ONCE = 2**20
"""The bytes of a table whose digest is computed at once, because temporary values should fit into a cache."""
_COUNTLESS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
"""The optimizers whose updates do not depend on the number of earlier updates."""


@dataclass(frozen=True)
class Shard:
    """The part of a table that this rank owns."""

    table: Table
    weight: Tensor  # view of the live weights, shape [rows, columns] of the shard
    state: dict[str, Tensor]  # views of the live state, by torch's names; [rows, columns], [rows] or one value
    rows: slice  # rows of the table, by their positions in order
    columns: slice  # columns of the table
    order: RowOrder  # order of the table's rows

    @property
    def ids(self) -> Tensor:
        """The ids of the rows, in the order of ``weight``: int64 of shape ``[rows]``."""
        return self.order.ids(self.rows.start, self.rows.stop)

    def read(self, whole: Tensor, into: Tensor) -> None:
        """Copy this part of a whole table, or of a row-wise state ``[rows, 1]``, into ``weight`` or an entry of ``state``."""
        self.order.read(whole[(slice(None), *self.place_in(whole.shape)[1:])], self.rows.start, into)

    def place_in(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return the rows, by position, and the columns of this part in a whole table or state of the given shape."""
        return (self.rows,) if shape[1] == 1 else (self.rows, self.columns)


@dataclass(frozen=True)
class ShardingRecord:
    """The attribute ``freescale_sharding`` of TorchRec's sharded modules. A later call uses it to shard the module again."""

    collection: Collection
    plan: Any  # TorchRec's plan for the tables
    orders: dict[str, RowOrder]  # by table name
    optimizers: dict[str, TableOptimizer]  # by table key
    in_backward: dict[str, TableOptimizer]  # the optimizers that the user has applied in backward
    updates: dict[str, int]  # number of updates, by table key, of all collections that were sharded together
    checks: LookupChecks  # checks of the module's lookups


class ShardedTables:
    """All sharded tables of a module: the collections with TorchRec's sharded modules, and what they have in common."""

    def __init__(self, modules: Sequence[tuple[Collection, Any]]) -> None:
        self.modules = list(modules)
        self.optimizers = {key: how for _, module in modules for key, how in module.freescale_sharding.optimizers.items()}
        self.tables = [table for collection, _ in modules for table in collection.tables]
        self.torchrec_group: dist.ProcessGroup = modules[0][1]._env.process_group
        self.device: torch.device = modules[0][1]._device

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks, which replaces ``torchrec_group`` after a failed run. TorchRec cannot change it."""
        return current_lane(self.torchrec_group)

    def message_device(self) -> torch.device:
        """Return the device of the group's messages: the device of the shards, or the CPU if the group uses gloo."""
        on_gpu = isinstance(self.group, ProcessGroupFreeScale) and self.group.uses_nccl
        return self.device if on_gpu else torch.device("cpu")

    def shards(self) -> Iterator[Shard]:
        """Yield every shard that this rank owns."""
        for collection, module in self.modules:
            yield from shards_of(collection, module)

    def names_in_module(self) -> list[str]:
        """Return the names of the sharded parameters and buffers of the module, which DDP must ignore."""
        found = [table.key for table in self.tables]
        for collection, module in self.modules:
            if collection.managed:
                tensors = [*module.named_parameters(), *module.named_buffers()]
                found += [collection.names(name)[0] for name, _ in tensors]
        return found

    def state_dict_keys(self) -> dict[str, str]:
        """Return the key of every table by each of its names in the module's state dict."""
        found: dict[str, str] = {}
        for collection, _ in self.modules:
            for table in collection.tables:
                found |= dict.fromkeys(collection.names(table.key.removeprefix(f"{collection.path}.")), table.key)
        return found

    @contextmanager
    def shown_whole(self, root: nn.Module) -> Iterator[None]:
        """Make ``root.parameters()`` return all tables at full size, on the meta device, also those of other ranks."""
        whole, tables = {}, {table.key: table for table in self.tables}
        with ExitStack() as stack:
            for name, key in self.state_dict_keys().items():
                path, _, leaf = name.rpartition(".")
                holder: Any = root.get_submodule(path)
                if key not in whole:
                    values = torch.empty(tables[key].rows, tables[key].dim, dtype=tables[key].dtype, device="meta")
                    whole[key] = nn.Parameter(values, holder._parameters[leaf].requires_grad)
                stack.callback(setattr, holder, "_parameters", holder._parameters)
                holder._parameters = {**holder._parameters, leaf: whole[key]}
            yield

    @torch.no_grad()
    def full_weight(self, path: str) -> Tensor:
        """Return a copy of a whole table on every rank, see :meth:`.TableStrategy.full_weight`. Collective; drain first."""
        keys = self.state_dict_keys()
        key = keys.get(path, keys.get(f"{path}.weight"))
        if key is None:
            known = [name.removesuffix(".weight") for name in keys]
            near = get_close_matches(path, known, n=1)
            raise ValueError(
                f"full_weight({path!r}): there is no sharded table with this name. "
                f"{f'Did you mean {near[0]!r}?' if near else f'The sharded tables are {known}.'}"
            )
        (table,) = (table for table in self.tables if table.key == key)
        whole = torch.zeros(table.rows, table.dim, dtype=table.dtype, device=self.device)
        for shard in self.shards():
            if shard.table.key == key:
                shard.order.write(shard.weight, shard.rows.start, whole[:, shard.columns])
        # each value is on one rank, and the others have zeros. The sum of the bits is exact, also for -0.0
        dist.all_reduce(whole.view(torch.int32 if table.dtype.itemsize == 4 else torch.uint8), group=self.group)
        return whole

    def idle_tables(self, backward: bool, skip: Container[str]) -> list[str]:
        """Return the keys of the tables that the last step has not updated, except collections at the paths ``skip``."""
        idle = [c for c, module in self.modules if not (backward and module.freescale_sharding.checks.lookups)]
        return [table.key for collection in idle if collection.path not in skip for table in collection.tables]

    def prepare_update(self, settings: Mapping[str, UpdateSettings], skip: Container[str] = ()) -> None:
        """Prepare the update of a training step before its forward, except for collections at the paths ``skip``."""
        for collection, module in self.modules:
            if collection.path in skip:
                continue
            module.freescale_sharding.checks.lookups = 0
            keys = {table.name: table.key for table in collection.tables}
            for kernel in kernels(module):
                held = [keys[spec.name] for spec in kernel._config.embedding_tables]
                prepare_kernel(kernel.emb_module, {key: settings[key] for key in held})


def refuse_whole_use(key: str) -> NoReturn:
    """Raise because a loss over all rows of a sharded table needs the overlap engine."""
    raise ValueError(
        f"a loss over all rows of the sharded table {key!r} needs the overlap engine, which runs only in training and "
        "evaluation steps and not with overlap='torchrec'. Compute the loss in a step, pass overlap=True, or remove the "
        f"nn.Embedding from shard=. To read a copy of the table, call "
        f"trainer.strategy.full_weight({key.removesuffix('.weight')!r})."
    )


def prepare_kernel(module: Any, settings: Mapping[str, UpdateSettings]) -> None:
    """Set the options of the next update of FBGEMM's ``module``, which reads them in forward.

    The settings of all tables of the module must agree, because the kernel has one value for all.
    """
    given = next(iter(settings.values()))
    frozen = [key for key, each in settings.items() if each.frozen]
    if frozen and len(frozen) < len(settings):
        raise ValueError(
            f"embedding tables {frozen} are frozen (requires_grad=False) and {sorted(settings.keys() - set(frozen))} are not, "
            "but one FBGEMM kernel updates them together. Freeze and unfreeze all of them at once, or put them into separate "
            "parameter groups."
        )
    if module.optimizer not in _COUNTLESS and len({each.step for each in settings.values()}) > 1:
        raise ValueError(
            f"embedding tables {list(settings)} have had {[each.step for each in settings.values()]} updates, because some "
            "were frozen for some time, but one FBGEMM kernel updates them together, with one bias correction. Put them into "
            "separate parameter groups."
        )
    if module.placeholder_autograd_tensor.requires_grad == given.frozen:
        module.requires_grad_(not given.frozen)
    module.update_hyper_parameters(given.options)
    # FBGEMM counts forwards, including validation. Adam's bias correction needs the number of updates, which it reads from
    # iter_cpu or, if that is 0, from iter
    module.iter.fill_(given.step)
    module.iter_cpu.fill_(given.step)


def shards_of(collection: Collection, module: Any) -> Iterator[Shard]:
    """Yield every shard of a collection that this rank owns; ``module`` is TorchRec's sharded module."""
    tables = {table.name: table for table in collection.tables}
    for kernel in kernels(module):
        specs = kernel._config.embedding_tables
        states = getattr(kernel, "sparse_adam_states", None) or kernel.emb_module.get_optimizer_state() or [{}] * len(specs)
        # write a GPU's cache back and empty it, because the caller may write the table. Not tested on GPU
        kernel.emb_module.flush()
        kernel.emb_module.reset_cache_states()
        for spec, weight, state in zip(specs, kernel.emb_module.split_embedding_weights(), states):
            place, table = spec.local_metadata, tables[spec.name]
            rows = slice(place.shard_offsets[0], place.shard_offsets[0] + place.shard_sizes[0])
            columns = slice(place.shard_offsets[1], min(place.shard_offsets[1] + place.shard_sizes[1], table.dim))
            width = columns.stop - columns.start  # the other columns are padding
            kept = {name: value[..., :width] if value.dim() == 2 else value for name, value in state.items() if value.numel()}
            yield Shard(table, weight[:, :width], kept, rows, columns, module.freescale_sharding.orders[spec.name])


def kernels(module: Any) -> Iterator[Any]:
    """Yield this rank's fused kernels of a sharded collection."""
    for lookup in module._lookups:
        yield from (kernel for kernel in lookup.modules() if isinstance(kernel, FusedOptimizerModule))


@torch.no_grad()
def follow_first_rank(collection: Collection, weights: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Copy the unsharded ``weights``, by key, from rank 0 if they differ, as DDP does for dense parameters. Collective."""
    for weight in (weights[table.key].data for table in collection.tables):
        if weight.is_meta:
            continue
        mine = _digest(weight)
        digests = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(digests, mine, group=group)
        if any(not torch.equal(other, mine) for other in digests):
            dist.broadcast(weight, dist.get_global_rank(group, 0), group=group)


def _digest(weight: Tensor) -> Tensor:
    """Return two sums over the words of a table; the second sum depends on the order of the rows."""
    sums = torch.zeros(2, dtype=torch.int64, device=weight.device)
    row_bytes = weight[:1].nbytes
    word = torch.int64 if row_bytes % 8 == 0 else torch.int32 if weight.itemsize == 4 else torch.int16
    for start in range(0, len(weight), at_once := max(1, _BYTES_AT_ONCE // max(1, row_bytes))):
        part = weight[start : start + at_once].contiguous()
        aligned = part.clone() if part.storage_offset() * part.itemsize % 8 else part  # a slice of a flat tensor may not be
        words = aligned.view(word).long()
        rows = (words ^ (words >> 32)).sum(dim=1)  # otherwise two changes of the highest bit would cancel
        sums += torch.stack([rows.sum(), (rows * torch.arange(start, start + len(rows), device=weight.device)).sum()])
    return sums


def fill_shards(
    collection: Collection,
    module: Any,
    original: Any,
    whole: Mapping[str, nn.Parameter],
    optimizers: Mapping[str, TableOptimizer],
) -> None:
    """Initialise the weights and states of the shards of ``module`` from ``original``, the module before the sharding.

    ``whole`` has the weights of an unsharded ``original``, by table key.
    """
    record = getattr(original, "freescale_sharding", None)
    earlier = {_position(shard): shard for shard in shards_of(collection, original)} if record is not None else {}
    for shard in shards_of(collection, module):
        name, key = shard.table.name, shard.table.key
        if "sum" in shard.state:
            shard.state["sum"].fill_(optimizers[key].initial_state)
        if record is not None:
            source = earlier.get(_position(shard))
            if source is None or source.weight.shape != shard.weight.shape or source.order != shard.order:
                raise ValueError(
                    f"table {name!r} is already sharded by another plan. To use the new plan, save a checkpoint and load it "
                    "into a new module."
                )
            shard.weight.copy_(source.weight)
            for state, value in shard.state.items() if key in record.in_backward else ():
                value.copy_(source.state[state])
        elif whole[key].is_meta:
            shard.table.init(shard.weight)
            if shard.table.padding_row is not None:
                shard.weight[shard.ids == shard.table.padding_row] = 0.0
        else:
            shard.read(whole[key], into=shard.weight)


def _position(shard: Shard) -> tuple[str, int, int]:
    return shard.table.name, shard.rows.start, shard.columns.start
