"""Shard the embedding collections of a module with TorchRec."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from lightning_freescale.embeddings.collections import Collection, Table, find_collections, replace_everywhere
from lightning_freescale.embeddings.data_parallel import add_data_parallel, share_data_parallel
from lightning_freescale.embeddings.id_checks import LookupChecks
from lightning_freescale.embeddings.id_remapping import fill_id_remappings
from lightning_freescale.embeddings.managed_collision import patch_sharded
from lightning_freescale.embeddings.optimizer import FROZEN, TableOptimizer, new_state
from lightning_freescale.embeddings.planning import (
    check_plan,
    check_tables,
    memory_for_tables,
    padded_plan,
    place_rows,
    row_orders,
    row_wise_planner,
)
from lightning_freescale.embeddings.shards import (
    ShardedTables,
    ShardingRecord,
    fill_shards,
    follow_first_rank,
    kernels,
    refuse_whole_use,
)

Found: TypeAlias = "list[tuple[Collection, Any]]"
"""The collections of a module, each with its current module."""


@dataclass
class _Place:
    collection: Collection
    original: Any  # unsharded, or sharded by an earlier call
    record: ShardingRecord | None  # of the original, if it is sharded
    weights: dict[str, nn.Parameter]  # of the original, by key
    current: Any  # on the meta device


class TableSharding:
    """Replaces the embedding collections of a module by TorchRec's sharded modules.

    The constructor replaces every collection under ``root`` by its blueprint, a copy on the meta device. An optimizer that is
    built now has the parameter names and groups of the unsharded module, without memory for tables. Then call :meth:`shard` or
    :meth:`restore`.

    Args:
        root: module to change in place.
        device: device of the shards.
        overlap: whether the overlap engine will run. It updates some tables that FBGEMM cannot update.
        found: collections under ``root``, a result of :func:`.find_collections`; None to search for them.

    Raises:
        ValueError: an optimizer that the user has applied in backward cannot update a sharded table on ``device``.
    """

    def __init__(self, root: nn.Module, device: torch.device, overlap: bool = False, found: Found | None = None) -> None:
        self.root, self.device, self._overlap = root, device, overlap
        found = find_collections(root) if found is None else found
        for collection, _ in found:
            check_tables(collection, overlap, device)
        self._places = [
            _Place(each, module, getattr(module, "freescale_sharding", None), each.parameters(module), each.blueprint())
            for each, module in found
        ]
        overlapped = [collection for collection, _ in found if overlap and not collection.managed]
        # keys of the tables that the overlap engine can update
        self.sparse_adam = frozenset(table.key for collection in overlapped for table in collection.tables)
        self.in_backward: dict[str, TableOptimizer] = {}  # optimizers that the user has applied in backward, by table key
        self.updates: dict[str, int] = {}  # number of updates, by table key; continues only for tables in in_backward
        self.parameters: dict[str, nn.Parameter] = {}  # on the meta device, by key; also those in which TorchRec stores ids
        self._adopted: list[tuple[dict[str, Any], list[Any]]] = []  # parameter groups and their earlier parameters
        for place in self._places:
            share_data_parallel(place.collection, place.original, place.current)
            place.collection.carry(place.original, place.current)
            self.parameters |= place.collection.parameters(place.current)
            self._read_tables(place)
            place.collection.put(root, place.original, place.current)

    def restore(self) -> None:
        """Restore the collections and the parameters of an adopted optimizer after a failure."""
        for place in self._places:
            place.collection.put(self.root, place.current, place.original)
        for group, parameters in self._adopted:
            group["params"] = parameters

    def adopt(self, optimizer: Optimizer) -> None:
        """Replace the unsharded weights in an optimizer, which must not have updated tables yet, by the blueprints."""
        replaced: dict[Any, nn.Parameter] = {}
        for place in self._places:
            replaced |= {weight: self.parameters[key] for key, weight in place.weights.items()}
        states = (optimizer.state[weight] for weight in replaced if weight in optimizer.state)
        if steps := max((int(state.get("step", 0)) for state in states), default=0):
            raise ValueError(
                f"{type(optimizer).__name__} has made {steps} updates of embedding tables before they are sharded. Create a "
                "new optimizer. After fabric.setup, load the old state with fabric.load or optimizer.load_state_dict."
            )
        for weight in replaced:
            optimizer.state.pop(weight, None)
        self._adopted = [(group, list(group["params"])) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(weight, weight) for weight in group["params"]]

    def shard(
        self,
        *,
        group: dist.ProcessGroup,
        local_world_size: int,
        plan: Any = None,
        optimizers: Mapping[str, TableOptimizer] | None = None,
    ) -> ShardedTables:
        """Shard every collection and keep its weights. Collective.

        The device never holds an unsharded table. Empty shards are created on it and filled from the unsharded weights, from
        the shards of an earlier call, or, if the weights are on the meta device, by the initialiser of each table.

        Args:
            group: process group of the embedding exchange, with all ranks.
            local_world_size: number of ranks per node.
            plan: TorchRec sharding plan with an entry for every collection, or a TorchRec planner. The default is the plan of
                an earlier call, or else a row-wise planner.
            optimizers: optimizer of each table, by key. Tables without an optimizer are frozen.

        Raises:
            ValueError: the plan lacks a collection or a table, or differs from the plan of an earlier call.
        """
        for place in self._places:
            # the optimizer was built over the user's modules, such as an nn.Embedding; TorchRec shards collections
            planned = place.collection.torchrec()
            replace_everywhere(self.root, place.current, planned)
            place.current = planned
        tables = [table for place in self._places for table in place.collection.tables]
        chosen = {table.key: (optimizers or {}).get(table.key, FROZEN) for table in tables}
        plan = self._plan(plan, group, local_world_size)
        # the random numbers for new shards must not change the dropout of the run
        with torch.random.fork_rng(devices=[self.device.index] if self.device.type == "cuda" else []):
            torch.manual_seed(torch.initial_seed() + 1 + group.rank())  # with one seed, the shards would be copies
            env = ShardingEnv.from_process_group(group)
            # the initial values of tables on the meta device are the random numbers that follow TorchRec's
            meta = any(weight.is_meta for place in self._places for weight in place.weights.values())
            with _ranks_per_node(local_world_size), nullcontext() if meta else _WithoutInitialValues():
                modules = [self._shard_collection(place, plan, chosen, env) for place in self._places]
            for place, module in zip(self._places, modules):
                if place.record is None:
                    follow_first_rank(place.collection, place.weights, group)
                fill_shards(place.collection, module, place.original, place.weights, chosen)
                if place.collection.managed:
                    fill_id_remappings(place.collection, module, place.original)
        for place, module in zip(self._places, modules):
            place.collection.put(self.root, place.current, module)
            # the model may hold the unsharded weights elsewhere, too, where they would not be trained
            for key, weight in place.weights.items() if place.record is None else ():
                if weight.requires_grad:
                    weight.register_post_accumulate_grad_hook(partial(_refuse_gradient, key, "the unsharded weight"))
        return ShardedTables([(place.collection, module) for place, module in zip(self._places, modules)])

    def _read_tables(self, place: _Place) -> None:
        for key in (table.key for table in place.collection.tables):
            weight = place.weights[key]
            self.updates[key] = 0
            self.parameters[key].requires_grad_(weight.requires_grad)
            if place.record is None:
                given = TableOptimizer.from_applied_in_backward(weight, key, self.device, key in self.sparse_adam)
            else:
                given = place.record.in_backward.get(key)
                self.updates[key] = 0 if given is None else place.record.updates[key]
            if given is not None:
                self.in_backward[key] = given

    def _plan(self, plan: Any, group: dist.ProcessGroup, local_world_size: int) -> ShardingPlan:
        if isinstance(plan, ShardingPlan):
            return plan
        earlier = {place.collection.path: place.record.plan for place in self._places if place.record is not None}
        if len(earlier) == len(self._places):
            return ShardingPlan(earlier)
        collections = [place.collection for place in self._places]
        if plan is None:
            weights = [weight for place in self._places for weight in place.current.parameters()]
            memory = memory_for_tables(self.root, weights, self.device, group)
            plan = row_wise_planner(collections, self.device, group.size(), local_world_size, memory)
        # the default group, because ``group`` would have to connect gloo for this one broadcast
        whole = dist.group.WORLD if group.size() == dist.get_world_size() else group
        made: ShardingPlan = plan.collective_plan(self.root, [collection.sharder for collection in collections], whole)
        return made

    def _shard_collection(
        self, place: _Place, plan: ShardingPlan, optimizers: Mapping[str, TableOptimizer], env: ShardingEnv
    ) -> Any:
        collection, blueprint = place.collection, place.current
        tables: Any = plan.plan.get(collection.path)
        if tables is None or any(table.name not in tables for table in collection.tables):
            raise ValueError(
                f"the sharding plan has no entry for collection {collection.path!r} with tables "
                f"{[table.name for table in collection.tables]}, only for {sorted(plan.plan)}. Add it, or remove plan=."
            )
        chosen = {table.key: optimizers[table.key] for table in collection.tables}
        tables = padded_plan(collection, tables)
        check_plan(collection, tables, chosen, self._overlap)
        orders = row_orders(collection, tables, env.world_size)
        planned = dict(blueprint.named_parameters(remove_duplicate=False))
        for table in collection.tables:
            (weight,) = (each for name, each in planned.items() if f".{name}".endswith(f".{table.name}.weight"))
            weight.requires_grad_(self.parameters[table.key].requires_grad)
            # the overlap engine updates single rows of a kernel, so all rows of a kernel must have one width without padding
            width = min(table.dim, tables[table.name].sharding_spec.shards[0].shard_sizes[1])
            _attach_optimizer(weight, chosen[table.key], f"{width}" if self._overlap else "")
        # use TorchRec's sharder instead of DistributedModelParallel, because the strategy's model must be a DDP with the user's
        # options, and a second fit must be able to shard a collection again
        module: Any = collection.sharder.shard(blueprint, tables, env, self.device)
        if collection.managed:
            patch_sharded(module)
        else:
            module.register_buffer = partial(_as_attribute, module)
        place_rows(collection, module, orders)
        _register_leaves(collection, module, self.parameters)
        for kernel in kernels(module):
            kernel.emb_module.register_forward_hook(_keep_in_graph)
        _add_sparse_adam_states(collection, module, chosen)
        in_backward = {key: self.in_backward[key] for key in chosen if key in self.in_backward}
        trained = {key: optimizer for key, optimizer in chosen.items() if self.parameters[key].requires_grad}
        checks = LookupChecks(collection, trained)
        module.freescale_sharding = ShardingRecord(collection, tables, orders, chosen, in_backward, self.updates, checks)
        module.__reduce_ex__ = partial(_refuse_copy, collection)
        module.register_forward_pre_hook(checks, with_kwargs=True)
        module.register_forward_hook(_wait_for_output)
        if collection.pooled:
            columns = partial(_pooled_columns, collection.tables, blueprint._embedding_names)
            module.register_forward_hook(columns, with_kwargs=True)
        add_data_parallel(collection, place.original, module)
        collection.carry(place.original, module)
        return module


class ShardedTable(nn.Module):
    """The module of one table in a sharded collection. Its weight is this rank's part of the table."""


class _WithoutInitialValues(TorchFunctionMode):
    """Skips the random values with which TorchRec fills new shards twice, and which :func:`.fill_shards` replaces."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.uniform_ or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def _ranks_per_node(count: int) -> Iterator[None]:
    # TorchRec groups the ranks of a node by this variable, which Lightning's launcher does not set. patch.dict would empty the
    # environment of other threads for a moment
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = f"{count}"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before


def _attach_optimizer(weight: Any, optimizer: TableOptimizer, kernel_of: str = "") -> None:
    # TorchRec reads these two attributes. A kernel has one learning rate and is frozen as a whole, so tables of different
    # parameter groups must not share a kernel. TorchRec separates tables by _batch_key and removes it afterwards
    fused = FROZEN if optimizer.sparse_adam else optimizer
    own = sorted(optimizer.arguments.items()) if optimizer.sparse_adam else ""
    weight._optimizer_classes = [fused.fused_class]
    batch_key = f"{optimizer.group} {weight.requires_grad} {own} {kernel_of}"
    weight._optimizer_kwargs = [{**fused.arguments, "_batch_key": batch_key}]


def _register_leaves(collection: Collection, module: Any, blueprint: Mapping[str, nn.Parameter]) -> None:
    # TorchRec's parameters are views, so their requires_grad cannot be set. Replace them by leaves with the same memory
    for table in collection.tables:
        path, _, name = table.key.removeprefix(f"{collection.path}.").rpartition(".")
        holder = module.get_submodule(path)
        if type(holder) is nn.Module:
            holder.__class__ = ShardedTable  # the type in printed modules and summaries
        held = holder._parameters
        view = held[name]
        leaf = nn.Parameter(view.detach())
        leaf._in_backward_optimizers = view._in_backward_optimizers  # type: ignore[attr-defined]
        leaf.register_post_accumulate_grad_hook(partial(_refuse_gradient, table.key, "this rank's part of the weight"))
        leaf.freescale_catalogue = partial(refuse_whole_use, table.key)  # type: ignore[attr-defined]
        leaf.requires_grad_(blueprint[table.key].requires_grad)  # after the hook, which needs requires_grad
        held[name] = leaf


def _as_attribute(module: nn.Module, name: str, tensor: Tensor, persistent: bool = True) -> None:
    # TorchRec's first forward registers the order of features as a buffer. A callback that averages buffers would change it
    object.__setattr__(module, name, tensor)


def _refuse_copy(collection: Collection, protocol: Any) -> None:
    table = collection.tables[0].key.removesuffix(".weight")
    raise TypeError(
        f"{collection.path!r} is sharded over the ranks and cannot be copied with copy.deepcopy, "
        "torch.optim.swa_utils.AveragedModel or pickle. To average weights, use Lightning's callback EMAWeightAveraging or "
        f"WeightAveraging. To copy a whole table, call strategy.full_weight({table!r}) on every rank."
    )


def _refuse_gradient(key: str, what: str, weight: Tensor) -> None:
    weight.grad = None
    raise ValueError(
        f"the loss depends on {what} of the sharded table {key!r} itself instead of rows that were looked up. Its gradient "
        "would be lost. If the loss has a term over all parameters, such as an L2 norm, exclude the table, and regularize the "
        "rows that the step looks up or set weight_decay= of the optimizer. trainer.strategy.full_weight reads a copy of the "
        "table. An nn.Embedding can be removed from shard=."
    )


def _add_sparse_adam_states(collection: Collection, module: Any, chosen: Mapping[str, TableOptimizer]) -> None:
    keys = {table.name: table.key for table in collection.tables}
    for kernel in kernels(module):
        if chosen[keys[kernel._config.embedding_tables[0].name]].sparse_adam:
            # FBGEMM's kernel holds only the rows. This list holds the moments, in the order of the kernel's tables
            kernel.sparse_adam_states = [new_state(weight) for weight in kernel.emb_module.split_embedding_weights()]


def _keep_in_graph(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    # the output of a frozen kernel needs no gradient, but the backward exchange with other ranks' tables needs this rank
    return output if output.requires_grad or not torch.is_grad_enabled() else output.requires_grad_()


def _wait_for_output(module: nn.Module, args: Any, output: Any) -> Any:
    # TorchRec's lazy result is not a dict, and a rank that never reads it would block the others. Only collections that are not
    # overlapped pay for this: their exchange cannot run during the next lookup
    if isinstance(output, tuple):
        return tuple(part.wait() if hasattr(part, "wait") else part for part in output)
    return output.wait() if hasattr(output, "wait") else output


def _pooled_columns(
    tables: tuple[Table, ...], names: list[str], module: Any, args: Any, kwargs: dict[str, Any], output: KeyedTensor
) -> KeyedTensor:
    # TorchRec orders features by table and owner, so the order depends on the number of ranks. A layer over all columns would
    # read other columns than in training
    by_torchrec = module.freescale_sharding.checks.enabled  # TorchRec adds up all bags; the overlap engine computes means
    means = [feature if table.mean and by_torchrec else None for table in tables for feature in table.features]
    if list(output.keys()) == names and not any(means):
        return output
    found, features = output.to_dict(), args[0] if args else kwargs["features"]
    columns = [found[name] / _bag_sizes(features, mean) if mean else found[name] for name, mean in zip(names, means)]
    return KeyedTensor.from_tensor_list(names, columns)


def _bag_sizes(features: KeyedJaggedTensor, feature: str) -> Tensor:
    sizes = features[feature].lengths().clamp(min=1)[:, None]
    if features.variable_stride_per_key():
        keys, samples = features.inverse_indices()  # samples may share bags
        return sizes[samples[keys.index(feature)]]
    return sizes
