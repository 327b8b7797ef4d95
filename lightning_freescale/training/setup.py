"""Set-up of a module with sharded tables, for the Trainer and for Fabric: find collections, shard them, wrap the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Collection as Group
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale._lightning.loops import rank_zero_info, rank_zero_warn
from lightning_freescale.comm import ProcessGroupFreeScale, ProcessGroupFreeScaleOptions
from lightning_freescale.comm.options import LazyGlooOptions
from lightning_freescale.comm.shared_lane import shared_lane

if TYPE_CHECKING:
    from lightning_freescale.embeddings.overlap import OverlapEngine
    from lightning_freescale.embeddings.parameter_groups import ParameterGroups
    from lightning_freescale.embeddings.plain_embedding import EmbeddingChoice
    from lightning_freescale.embeddings.sharding import Found, TableSharding
    from lightning_freescale.embeddings.shards import ShardedTables
    from lightning_freescale.profiling.recording.timeline import Timeline
    from lightning_freescale.training.table_step import TableStep

Shard: TypeAlias = Sequence[str] | Literal["auto"] | None
"""Which plain ``nn.Embedding`` and ``nn.EmbeddingBag`` modules to shard, see :func:`.choose_embeddings`."""


class TableStrategy:
    """Base class of strategies with sharded tables: their options, and the users' access to the tables between steps."""

    tables: ShardedTables | None = None  # None if the module has none
    table_step: TableStep | None = None  # runs the steps of these tables; None outside of a run
    at_teardown: ExitStack
    # from the other base class of a subclass
    group_timeout: timedelta
    num_nodes: int
    ddp_options: dict[str, Any]
    if TYPE_CHECKING:

        @property
        def num_processes(self) -> int:
            """The number of ranks on this node."""

        @property
        def root_device(self) -> torch.device:
            """The device of this rank."""

    def set_options(
        self,
        plan: Any,
        transport: str,
        overlap: bool | str,
        dedup: bool,
        ids_of: Callable[[Any], Any] | None,
        shard: Shard,
        split_backward: bool,
        hot_rows: Literal["auto"] | int | float,
        rerank_every_n_steps: int,
        wire: str | Mapping[str, str],
    ) -> None:
        """Check and keep the options, see :class:`lightning_freescale.FreeScaleStrategy`."""
        if overlap not in (True, False, "torchrec"):
            raise ValueError(f"FreeScaleStrategy(overlap={overlap!r}): pass True, False or 'torchrec'")
        if ids_of is not None and not callable(ids_of):
            raise TypeError(f"FreeScaleStrategy(ids_of={ids_of!r}): pass a function that maps a batch to a KeyedJaggedTensor")
        self.by_torchrec = overlap == "torchrec"  # whether TorchRec exchanges the rows of all tables
        # why no exchange is overlapped, as a clause that names the option; empty if exchanges are overlapped
        hides = overlap not in (False, "torchrec")
        self.no_overlap = "" if hides else f"FreeScaleStrategy(overlap={overlap!r}) hides no exchange"
        ours = "TorchRec's exchange (overlap='torchrec') does not have this option" if self.by_torchrec else ""
        cold = "no rows are hot (hot_rows=0)" if hot_rows == 0 else ""
        given = {
            "ids_of=...": (ids_of is not None, self.no_overlap),
            f"split_backward={split_backward!r}": (split_backward, self.no_overlap),
            f"hot_rows={hot_rows!r}": (hot_rows != "auto", ours),
            f"rerank_every_n_steps={rerank_every_n_steps!r}": (rerank_every_n_steps != 200, ours or cold),
            f"wire={wire!r}": (wire != "float32", ours),
        }
        for text, (is_given, useless) in given.items():
            if is_given and useless:
                raise ValueError(
                    f"FreeScaleStrategy({text}): {useless}, so the option has no effect. Remove one of the two options"
                )
        if hot_rows != "auto" or rerank_every_n_steps != 200 or wire != "float32":
            from lightning_freescale.embeddings.overlap.hot_rows import check_hot_rows
            from lightning_freescale.embeddings.overlap.row_codec import wire_types

            check_hot_rows(hot_rows, rerank_every_n_steps, dedup)
            wire_types(wire)
        paths = [] if shard is None or shard == "auto" else shard
        if isinstance(paths, str) or not isinstance(paths, Sequence) or not all(isinstance(path, str) for path in paths):
            example = f"[{shard!r}]" if isinstance(shard, str) else "['item_emb']"
            raise TypeError(f"FreeScaleStrategy(shard={shard!r}): pass a list of paths, such as {example}, or 'auto'")
        self.plan, self.transport = plan, ProcessGroupFreeScaleOptions(transport).transport
        self.overlap, self.dedup, self.ids_of, self.shard = not self.no_overlap, dedup, ids_of, shard
        self.split_backward, self.wire = split_backward, wire
        self.hot_rows_option, self.rerank_every_n_steps = hot_rows, rerank_every_n_steps

    @property
    def engine(self) -> OverlapEngine | None:
        """The engine that exchanges the rows of the tables; None if TorchRec exchanges them, and outside of a run."""
        return None if self.table_step is None else self.table_step.engine

    def drain(self) -> None:
        """Wait until the tables contain all updates of the steps so far. Call it on every rank before you read tables."""
        if self.engine is not None:
            self.engine.drain()

    def writing_tables(self) -> AbstractContextManager[None]:
        """Return a context for writes to the tables. Enter it on every rank.

        Pending updates are applied first, and prefetched rows are discarded.
        """
        return nullcontext() if self.table_step is None else self.table_step.writing()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Return a context for lookups outside of training steps, where ranks may make different numbers of lookups.

        Enter it on every rank. A rank that leaves the context serves rows to the other ranks until all ranks have left it. The
        Trainer's loops for validation, test and prediction do not need it.
        """
        yield
        if self.engine is not None:
            self.engine.serve_evaluation()

    def hot_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the ids of the current hot rows of each table and their accesses, most first. No communication.

        All ranks have the same lists after the same number of steps. See :meth:`.OverlapEngine.hot_rows`. The result is empty
        outside of a run, and if no row can be hot.

        If a callback of the Trainer has a method ``on_hot_rows_changed(trainer, pl_module, table, rows, counts)``, the strategy
        calls it for each table with a new list: on the training thread, before the forward, in the same step on all ranks.
        """
        return {} if self.engine is None else self.engine.hot_rows()

    def full_weight(self, path: str) -> Tensor:
        """Return a copy of a whole sharded table on every rank, shape ``[rows, dim]``, without gradient. Collective.

        The copy contains pending updates, but no later ones.

        Args:
            path: the name of the table in the module's state dict, such as ``"item_emb"`` for an ``nn.Embedding`` or
                ``"net.items.embeddings.item"`` for a table of an EmbeddingCollection.

        Raises:
            ValueError: there is no sharded table with this name.
        """
        if self.tables is None:
            raise ValueError(f"full_weight({path!r}): the module has no sharded tables. Read the parameter instead")
        self.drain()
        return self.tables.full_weight(path)


def refuse_unknown_options(given: Mapping[str, Any], strategy: type) -> None:
    """Raise a TypeError for an option that neither ``strategy``, nor its base classes, nor DistributedDataParallel take.

    Raise a ValueError for an option that would average the dense part over other ranks than those that share the tables.
    """
    takers = [vars(each)["__init__"] for each in strategy.__mro__[:-1] if "__init__" in vars(each)]
    names = {name for taker in (*takers, DistributedDataParallel) for name in signature(taker).parameters}
    names -= {"self", "ddp_options", "kwargs", "module", "device_ids"}
    for option, value in given.items():
        if option in ("process_group", "device_mesh") and value is not None:
            raise ValueError(
                f"{strategy.__name__}({option}=...): the dense part would be averaged over these ranks only, but all ranks "
                "share the embedding tables. Groups with tables of their own (TorchRec's DMPCollection) are not supported. "
                "Remove the option"
            )
        if option not in names:
            near = get_close_matches(option, names, n=1)
            hint = f"Did you mean {near[0]}=?" if near else "See its docstring and that of DistributedDataParallel"
            raise TypeError(f"FreeScaleStrategy({option}=...): there is no such option. {hint}")


def refuse_ddp_options(start_method: str, model_averaging_period: int | None = None) -> None:
    """Raise a ValueError for options of DDPStrategy that do not work with sharded tables."""
    if start_method != "popen":
        raise ValueError(
            f"FreeScaleStrategy(start_method={start_method!r}) would return the shards to the main process, which cannot hold "
            "them. Remove start_method and run a script, or use torchrun"
        )
    if model_averaging_period is not None:
        raise ValueError(
            f"FreeScaleStrategy(model_averaging_period={model_averaging_period!r}): local SGD lets parameters differ between "
            "ranks, which sharded tables do not allow. Remove the option"
        )


# -- steps of the set-up, in their order


def collections_of(module: nn.Module | None, shard: Shard, plan: Any = None, warn: bool = False, advise: str = "") -> Found:
    """Return the embedding collections of a module, see :func:`.find_collections`; none if TorchRec is not installed.

    Tables that ``plan`` makes data-parallel are not included.

    With ``warn``, warn about collections that cannot be sharded, refuse large ones, and log if there are none. ``advise`` is
    the name of the strategy in messages about large plain modules that it shards or could shard, or empty for no messages.
    """
    found: Found = []
    if module is not None and (find_spec("torchrec") is not None or shard):
        from lightning_freescale.embeddings.collection_kinds import check_replicas
        from lightning_freescale.embeddings.collections import find_collections
        from lightning_freescale.embeddings.data_parallel import without_data_parallel
        from lightning_freescale.embeddings.plain_embedding import choose_embeddings

        choice = choose_embeddings(module, shard)
        found = find_collections(module, set(choice.chosen.values()))
        for text in check_replicas(module, {each for _, held in found for each in held.modules()}) if warn else ():
            rank_zero_warn(text)
        if advise:
            _log_embeddings(choice, shard, found, advise)
        found = without_data_parallel(found, plan)
    if warn and not found:
        rank_zero_info("strategy 'freescale': the module has no embedding collection to shard. It trains as with 'ddp'")
    return found


def _log_embeddings(choice: EmbeddingChoice, shard: Shard, found: Found, strategy: str) -> None:
    """Log which large plain modules could be sharded, or which ones ``shard="auto"`` shards."""
    from lightning_freescale.embeddings.collection_kinds import LARGE_EMBEDDING

    sizes = {path: f"{path!r} ({e.num_embeddings} x {e.embedding_dim})" for path, e in (choice.chosen | choice.left).items()}
    if choice.left:
        rank_zero_info(
            f"strategy 'freescale': embedding {', '.join(sizes.values())} is replicated on every rank, and every step "
            f"reduces its dense gradient. To shard it, pass {strategy}(shard={[*sizes]!r}) or shard='auto'"
        )
    if shard == "auto":
        if sizes:
            rank_zero_info(f"strategy 'freescale': shard='auto' shards {', '.join(sizes.values())}")
        elif not any(c.embedding for c, _ in found):  # otherwise an earlier fit has sharded them
            rank_zero_info(
                f"strategy 'freescale': shard='auto' finds no plain embedding with {LARGE_EMBEDDING} or more values to shard"
            )
        for reason in choice.unshardable.values():
            rank_zero_info(f"strategy 'freescale': shard='auto' does not shard an embedding: {reason}")


@contextmanager
def table_sharding(module: nn.Module, device: torch.device, strategy: TableStrategy, found: Found) -> Iterator[TableSharding]:
    """Take the collections ``found`` out of their module for the block that shards them. Put them back if it raises."""
    from lightning_freescale.embeddings.sharding import TableSharding

    sharding = TableSharding(module, device, not strategy.by_torchrec, found)
    try:
        yield sharding
    except BaseException:
        sharding.restore()
        raise


def shard_tables(
    sharding: TableSharding, groups: ParameterGroups | None, lane: ProcessGroupFreeScale, strategy: TableStrategy
) -> ShardedTables:
    """Shard the tables, each with its optimizer in ``groups``, and return them. Collective."""
    optimizers = sharding.in_backward if groups is None else groups.optimizers
    lazy = [] if groups is None else sorted(key for key, how in optimizers.items() if how.moves_without_gradient)
    if lazy:
        kinds = " and ".join(sorted({optimizers[key].fused_class.__name__ for key in lazy}))
        rank_zero_info(
            f"strategy 'freescale': {kinds} updates only the rows of tables {lazy} that a step looks up, as TorchRec and "
            "torch.optim.SparseAdam do. With 'ddp', the dense optimizer also updates all other rows in every step. Expect "
            "different weights, unless the loss depends on all rows of the table"
        )
    return sharding.shard(group=lane, local_world_size=strategy.num_processes, plan=strategy.plan, optimizers=optimizers)


def lane_of_tables(strategy: TableStrategy) -> ProcessGroupFreeScale:
    """Return the process group of TorchRec's own exchanges. The default group stays as Lightning made it. Collective.

    A model needs it after its fit, too: for lookups, and to be saved.
    """
    # no compute overlaps these exchanges, and NCCL is the fastest transport then. The other transports are for the overlapped
    # exchange, whose collections have process groups of their own
    transport = "native" if strategy.transport == "auto" and strategy.root_device.type == "cuda" else strategy.transport
    return shared_lane(LazyGlooOptions(transport, name="embedding", priority=1), strategy.group_timeout)


def wrap_dense(module: nn.Module, sharded: Group[str], device_ids: list[int] | None, strategy: TableStrategy) -> nn.Module:
    """Wrap ``module`` in DistributedDataParallel on the default group, without the parameters named ``sharded``. Collective.

    If all trainable parameters are sharded, copy rank 0's dense parameters to all ranks and return ``module`` itself.
    """
    reduced = [p for name, p in module.named_parameters() if p.requires_grad and name not in sharded]
    if not reduced:
        sync_dense(module, sharded)
        return module
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(sharded))
    size = _bucket_size(reduced, strategy)
    model = DistributedDataParallel(module, device_ids=device_ids, **size, **strategy.ddp_options)
    if size:
        # DDP's reducer has the size already. Only torch.compile reads this attribute, and raises an error below 1 MiB
        model.bucket_bytes_cap = 25 * 2**20
    return model


def _bucket_size(reduced: Sequence[Tensor], strategy: TableStrategy) -> dict[str, Any]:
    """Return ``bucket_cap_mb`` of DDP on CPUs of several nodes: a third of the gradients, at least 64 KiB and below 25 MiB.

    DDP's own buckets of 1 and 25 MiB hold all gradients of a small model, so their exchange would begin after backward. The
    size follows from the module and the run, so a resumed run has the same buckets: on three or more ranks, sums depend on
    them. :func:`.lay_out_buckets` cannot restore those of a static graph, which keeps DDP's own, nor those of a module with a
    communication hook. On CPUs, Lightning ignores ``ddp_comm_hook``, and other hooks are registered after construction.
    """
    given = strategy.ddp_options
    third = sum(p.nbytes for p in reduced) / 3 / 2**20
    decided = given.get("static_graph") or given.keys() & {"bucket_cap_mb", "bucket_cap_mb_list"}
    if decided or strategy.num_nodes == 1 or third >= 25 or any(p.device.type != "cpu" for p in reduced):
        return {}
    return {"bucket_cap_mb": max(third, 1 / 16)}


def sync_dense(module: nn.Module, sharded: Group[str]) -> None:
    """Copy rank 0's dense parameters and buffers to all ranks. Collective. DistributedDataParallel does this by itself."""
    group = dist.group.WORLD
    assert group is not None
    _sync_module_states(module, group, 250 * 1024 * 1024, 0, set(sharded))


def new_table_step(
    strategy: TableStrategy,
    name: str,
    tables: ShardedTables,
    module: nn.Module,
    groups: ParameterGroups | None,
    *,
    farewell: bool,
    copies_early: bool = True,
    timeline: Timeline | None = None,
    split_windows: bool = False,
    **clips: Any,
) -> TableStep:
    """Return the table step of a run, with the engine that exchanges the rows and closes at teardown. Collective.

    ``name`` is the name of the strategy's class, for messages. ``groups`` is None outside of training. ``copies_early`` allows
    a copy of the next batch to the device before its step. ``clips`` are the engine's options for gradient clipping.
    """
    from lightning_freescale.training.next_ids import EarlyCopy, Lookahead
    from lightning_freescale.training.table_step import TableStep

    engine = None if strategy.by_torchrec else _new_engine(tables, strategy, clips)
    if engine is not None:
        strategy.at_teardown.callback(engine.close, farewell=farewell)
    if groups is None:
        return TableStep(tables, engine)
    lookahead = early_copy = None
    if engine is not None and strategy.overlap:
        lookahead = Lookahead(engine, module, strategy.ids_of, name)
        early_copy = EarlyCopy.for_device(tables.device, copies_early)
    return TableStep(
        tables,
        engine,
        groups,
        lookahead,
        early_copy=early_copy,
        timeline=timeline,
        split_backward=strategy.split_backward,
        split_windows=split_windows and engine is not None,
    )


def _new_engine(tables: ShardedTables, strategy: TableStrategy, clips: dict[str, Any]) -> OverlapEngine:
    from lightning_freescale.embeddings.overlap import OverlapEngine

    hot_rows, nodes, ranks = strategy.hot_rows_option, strategy.num_nodes, strategy.num_processes
    if hot_rows not in ("auto", 0) and 1 in (nodes, ranks):
        rank_zero_info(
            f"strategy 'freescale': hot_rows={hot_rows!r} has no effect with num_nodes={nodes} and {ranks} ranks per node. Hot "
            "rows need several nodes with several ranks each"
        )
    options = {**clips, "hot_rows": hot_rows, "rerank_every_n_steps": strategy.rerank_every_n_steps, "wire": strategy.wire}
    options["ranks_per_node"] = ranks
    engine = OverlapEngine(tables, strategy.dedup, strategy.group_timeout, strategy.transport, **options)
    if engine.hot_routing is not None and engine.hot_routing.choice:
        rank_zero_info(f"strategy 'freescale': {engine.hot_routing.choice}")
    return engine
