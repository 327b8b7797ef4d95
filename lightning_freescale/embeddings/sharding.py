"""Shard the embedding collections of a module with TorchRec."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec import KeyedTensor
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from lightning_freescale.embeddings.collections import Collection, find_collections, replace_everywhere
from lightning_freescale.embeddings.id_checks import LookupChecks
from lightning_freescale.embeddings.id_remapping import fill_id_remappings
from lightning_freescale.embeddings.managed_collision import patch_sharded
from lightning_freescale.embeddings.optimizer import FROZEN, TableOptimizer, new_state
from lightning_freescale.embeddings.placement import Placement, place_rows, row_orders
from lightning_freescale.embeddings.planning import (
    check_plan,
    check_tables,
    memory_for_tables,
    padded_plan,
    row_wise_planner,
)
from lightning_freescale.embeddings.shards import (
    ShardedTables,
    ShardingRecord,
    fill_shards,
    follow_first_rank,
    kernels,
    refuse_whole_use,
    shards_of,
)

Found: TypeAlias = "list[tuple[Collection, Any]]"
"""Collections of a module, each with what stands there now."""


class TableSharding:
    """Takes the embedding collections out of a module, and puts TorchRec's sharded ones in their places.

    Creating it replaces every collection under ``root`` by its blueprint, a copy on the meta device. So an optimizer can be
    built over the unsharded parameters, with their names and groups and without memory for tables, and tells which group
    drives which table. Then either :meth:`shard` or :meth:`restore` must follow.

    Args:
        root: the module, changed in place.
        device: where the shards will live.
        overlap: whether the overlap engine will run, which updates some tables that FBGEMM cannot.
        found: the collections under ``root``, as :func:`.find_collections` returns them; found here if not given.

    Attributes:
        parameters: meta-device weight of every table by its key in the state dict of ``root``, and the parameters in which
            TorchRec keeps ids, which no optimizer updates.
        in_backward: optimizers that the user has applied in backward, by table key.
        updates: how many each table's optimizer has done; those applied in backward go on where an earlier fit has ended.
        sparse_adam: keys of the tables that the overlap engine can update.

    Raises:
        ValueError: an optimizer that the user has applied in backward cannot update a sharded table on ``device``.
    """

    def __init__(self, root: nn.Module, device: torch.device, overlap: bool = False, found: Found | None = None) -> None:
        self.root, self.device, self._overlap = root, device, overlap
        if found is None:
            found = find_collections(root)
        for collection, _ in found:
            check_tables(collection, overlap)
        self._replaced = [(collection, module, collection.blueprint()) for collection, module in found]
        overlapped = [c for c, *_ in self._replaced if overlap and not c.managed]
        self.sparse_adam = frozenset(table.key for collection in overlapped for table in collection.tables)
        self.in_backward: dict[str, TableOptimizer] = {}
        self.updates: dict[str, int] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._adopted: list[tuple[dict[str, Any], list[Any]]] = []  # parameter groups, with what they held before
        for collection, module, blueprint in self._replaced:
            self.parameters |= collection.parameters(blueprint)
            self._read_weights(collection, module)
            if hasattr(module, "freescale_sharding"):
                record = module.freescale_sharding
                self.in_backward |= record.in_backward
                self.updates |= {key: record.updates[key] for key in record.in_backward}
            else:
                self._read_in_backward(collection, module)
            collection.put(root, module, blueprint)

    def restore(self) -> None:
        """Put back the collections, and the parameters of an adopted optimizer, if sharding has failed."""
        for collection, module, blueprint in self._replaced:
            collection.put(self.root, blueprint, module)
        for group, parameters in self._adopted:
            group["params"] = parameters

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer hold the blueprints in the places of the unsharded weights that it was built over.

        Raises:
            ValueError: it has updated tables already, by states that the shards would not have.
        """
        stands_for: dict[Any, nn.Parameter] = {}
        for collection, module, _ in self._replaced:
            stands_for |= {weight: self.parameters[key] for key, weight in collection.parameters(module).items()}
        states = (optimizer.state[weight] for weight in stands_for if weight in optimizer.state)
        if steps := max((int(state.get("step", 0)) for state in states), default=0):
            raise ValueError(
                f"{type(optimizer).__name__} has done {steps} updates of embedding tables before they are sharded: build it "
                "anew, and load what it had by fabric.load, or optimizer.load_state_dict, after fabric.setup"
            )
        for weight in stands_for:
            optimizer.state.pop(weight, None)
        self._adopted = [(group, list(group["params"])) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [stands_for.get(weight, weight) for weight in group["params"]]

    def shard(
        self,
        *,
        group: dist.ProcessGroup,
        local_world_size: int,
        plan: Any = None,
        optimizers: Mapping[str, TableOptimizer] | None = None,
        placement: Placement = "hash",
    ) -> ShardedTables:
        """Shard every collection, keeping its weights. Collective.

        Nothing unsharded is built on the device: shards are created empty there and filled from the unsharded weights, from
        the shards of an earlier call, or, for collections on the meta device, by each table's own initialiser.

        Args:
            group: process group of the embedding exchange, over all ranks.
            local_world_size: ranks per node.
            plan: TorchRec sharding plan with an entry for every collection, or a TorchRec planner; the plan of an earlier call,
                or else a row-wise planner, if not given.
            optimizers: for each table's key how backward updates it; tables left out are frozen.
            placement: of the rows of row-wise tables, see :func:`.placement.row_orders`.

        Raises:
            ValueError: the plan misses a collection or a table, or differs from the one that sharded them earlier.
        """
        collections = [collection for collection, *_ in self._replaced]
        self._replace_blueprints()
        chosen = {table.key: (optimizers or {}).get(table.key, FROZEN) for c in collections for table in c.tables}
        planner = plan if hasattr(plan, "collective_plan") else None
        if plan is None or planner is not None:
            plan = self._earlier_plan()
        if plan is None:
            if planner is None:
                weights = [weight for *_, planned in self._replaced for weight in planned.parameters()]
                memory = memory_for_tables(self.root, weights, self.device, group)
                planner = row_wise_planner(collections, self.device, group.size(), local_world_size, memory)
            # over the default group: this one would have to connect gloo for the broadcast, and nothing else needs that
            whole = dist.group.WORLD if group.size() == dist.get_world_size() else group
            plan = planner.collective_plan(self.root, [collection.sharder for collection in collections], whole)
        # an unsharded run would not draw the random numbers that shards are created with: dropout must stay what it was
        with torch.random.fork_rng(devices=[self.device.index] if self.device.type == "cuda" else []):
            torch.manual_seed(torch.initial_seed() + 1 + group.rank())  # else shards would start as copies of each other
            env = ShardingEnv.from_process_group(group)
            with _ranks_per_node(local_world_size):
                modules = [self._shard_collection(c, built, plan, chosen, env, placement) for c, _, built in self._replaced]
            for (collection, original, _), module in zip(self._replaced, modules):
                if not hasattr(original, "freescale_sharding"):
                    follow_first_rank(collection, original, group)
                fill_shards(shards_of(collection, module), collection, original, chosen)
                if collection.managed:
                    fill_id_remappings(collection, module, original)
        for (collection, original, blueprint), module in zip(self._replaced, modules):
            collection.put(self.root, blueprint, module)
            self._refuse_gradients(collection, original)
        return ShardedTables(list(zip(collections, modules)))

    def _refuse_gradients(self, collection: Collection, original: Any) -> None:
        """Refuse gradients of weights that are trained no more, because the model holds them elsewhere as well."""
        for key, weight in collection.parameters(original).items():
            if weight.requires_grad and not hasattr(original, "freescale_sharding"):
                weight.register_post_accumulate_grad_hook(partial(_refuse_gradient, key, "the unsharded weight"))

    def _read_weights(self, collection: Collection, module: Any) -> None:
        weights = collection.parameters(module)
        for key in (table.key for table in collection.tables):
            self.updates[key] = 0
            self.parameters[key].requires_grad_(weights[key].requires_grad)

    def _read_in_backward(self, collection: Collection, module: Any) -> None:
        weights = collection.parameters(module)
        for key in (table.key for table in collection.tables):
            given = TableOptimizer.from_applied_in_backward(weights[key], key, self.device, key in self.sparse_adam)
            if given is not None:
                self.in_backward[key] = given

    def _replace_blueprints(self) -> None:
        # the optimizer was built over what the user knows, an nn.Embedding, say; TorchRec plans and shards collections
        for index, (collection, original, blueprint) in enumerate(self._replaced):
            planned = collection.torchrec()
            replace_everywhere(self.root, blueprint, planned)
            self._replaced[index] = (collection, original, planned)

    def _earlier_plan(self) -> ShardingPlan | None:
        records = {collection.path: getattr(module, "freescale_sharding", None) for collection, module, _ in self._replaced}
        return ShardingPlan({path: r.plan for path, r in records.items() if r}) if all(records.values()) else None

    def _shard_collection(
        self,
        collection: Collection,
        blueprint: Any,
        plan: ShardingPlan,
        optimizers: Mapping[str, TableOptimizer],
        env: ShardingEnv,
        placement: Placement,
    ) -> Any:
        tables: Any = plan.plan.get(collection.path)
        if tables is None or any(table.name not in tables for table in collection.tables):
            raise ValueError(
                f"the sharding plan has no entry for collection {collection.path!r} with tables "
                f"{[table.name for table in collection.tables]}, only for {sorted(plan.plan)}: add it, or leave out plan="
            )
        chosen = {table.key: optimizers[table.key] for table in collection.tables}
        tables = padded_plan(collection, tables)
        check_plan(collection, tables, chosen)
        orders = row_orders(collection, tables, env.world_size, placement)
        planned = dict(blueprint.named_parameters(remove_duplicate=False))
        for table in collection.tables:
            (weight,) = (each for name, each in planned.items() if f".{name}".endswith(f".{table.name}.weight"))
            weight.requires_grad_(self.parameters[table.key].requires_grad)
            # a kernel updates rows one by one, as the overlap engine needs it, if they are of one width, padding left out
            width = min(table.dim, tables[table.name].sharding_spec.shards[0].shard_sizes[1])
            _attach_optimizer(weight, chosen[table.key], f"{width}" if self._overlap else "")
        # TorchRec's sharder, and no DistributedModelParallel: the strategy's model stays a DDP, as Lightning expects and with
        # the user's options, and a collection can be sharded anew for a second fit
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
            module.register_forward_hook(partial(_order_columns, blueprint._embedding_names))
        return module


@contextmanager
def _ranks_per_node(count: int) -> Iterator[None]:
    """Set meanwhile the variable by which TorchRec groups the ranks of a node: Lightning's launcher does not set it."""
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
    # TorchRec reads these two attributes. A kernel has one learning rate, and is frozen as a whole, so tables of different
    # parameter groups must not share one: _batch_key, which TorchRec strips, keeps them apart
    fused = FROZEN if optimizer.sparse_adam else optimizer
    own = sorted(optimizer.arguments.items()) if optimizer.sparse_adam else ""
    weight._optimizer_classes = [fused.fused_class]
    batch_key = f"{optimizer.group} {weight.requires_grad} {own} {kernel_of}"
    weight._optimizer_kwargs = [{**fused.arguments, "_batch_key": batch_key}]


def _register_leaves(collection: Collection, module: Any, blueprint: Mapping[str, nn.Parameter]) -> None:
    # TorchRec's parameters are views, whose requires_grad cannot be set; leaves over the same memory take it
    for table in collection.tables:
        path, _, name = table.key.removeprefix(f"{collection.path}.").rpartition(".")
        held = module.get_submodule(path)._parameters
        view = held[name]
        leaf = nn.Parameter(view.detach())
        leaf._in_backward_optimizers = view._in_backward_optimizers  # type: ignore[attr-defined]
        leaf.register_post_accumulate_grad_hook(partial(_refuse_gradient, table.key, "this rank's part of the weight"))
        leaf.freescale_catalogue = partial(refuse_whole_use, table.key)  # type: ignore[attr-defined]
        leaf.requires_grad_(blueprint[table.key].requires_grad)  # torch takes the hook only from one that requires grad
        held[name] = leaf


def _as_attribute(module: nn.Module, name: str, tensor: Tensor, persistent: bool = True) -> None:
    # TorchRec's first forward registers the order of features as a buffer, which a callback that averages buffers would change
    object.__setattr__(module, name, tensor)


def _refuse_copy(collection: Collection, protocol: Any) -> None:
    # copy.deepcopy and pickle ask for this
    table = collection.tables[0].key.removesuffix(".weight")
    raise TypeError(
        f"{collection.path!r} is sharded over the ranks and cannot be copied, by copy.deepcopy, by AveragedModel of "
        "torch.optim.swa_utils or by pickle. To average weights, use the callback EMAWeightAveraging or WeightAveraging of "
        f"Lightning's Trainer; for a copy of a whole table, strategy.full_weight({table!r}) on every rank"
    )


def _refuse_gradient(key: str, what: str, weight: Tensor) -> None:
    weight.grad = None
    raise ValueError(
        f"the loss depends on {what} of the sharded table {key!r} itself, not on rows that were looked up, and its gradient "
        "would be lost. Leave the table out of the term (an L2 norm over self.parameters(), say) and regularize the rows that "
        "the step looks up, or set weight_decay= where the optimizer takes it; trainer.strategy.full_weight reads a copy of "
        "the whole table; an nn.Embedding can be left out of shard="
    )


def _add_sparse_adam_states(collection: Collection, module: Any, chosen: Mapping[str, TableOptimizer]) -> None:
    keys = {table.name: table.key for table in collection.tables}
    for kernel in kernels(module):
        if chosen[keys[kernel._config.embedding_tables[0].name]].sparse_adam:
            # FBGEMM's kernel only holds the rows, the moments are beside it, in the order of its tables
            kernel.sparse_adam_states = [new_state(weight) for weight in kernel.emb_module.split_embedding_weights()]


def _keep_in_graph(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    # what a frozen kernel returns needs no gradient; but another rank may hold tables that do, and its exchange needs this one
    return output if output.requires_grad or not torch.is_grad_enabled() else output.requires_grad_()


def _wait_for_output(module: nn.Module, args: Any, output: Any) -> Any:
    # TorchRec's lazy result is no dict, and a rank that never looks at it would leave the others waiting. The price, an
    # exchange that could have run behind the lookup of the next, is paid only by collections that are not overlapped
    if isinstance(output, tuple):
        return tuple(part.wait() if hasattr(part, "wait") else part for part in output)
    return output.wait() if hasattr(output, "wait") else output


def _order_columns(names: list[str], module: nn.Module, args: Any, output: KeyedTensor) -> KeyedTensor:
    # TorchRec returns features by table and owner, in another order with other numbers of ranks: a layer over all columns
    # would read others than it was trained on
    if list(output.keys()) == names:
        return output
    found = output.to_dict()
    columns = [found[name] for name in names]
    return KeyedTensor(names, [each.shape[1] for each in columns], torch.cat(columns, dim=1))
