"""Find and shard the tables of a module, and wrap the part that is not sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Collection as Group
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale._lightning.loops import rank_zero_info, rank_zero_warn
from lightning_freescale.comm import BACKEND, ProcessGroupFreeScale, ProcessGroupFreeScaleOptions
from lightning_freescale.comm.options import LazyGlooOptions

if TYPE_CHECKING:
    from lightning_freescale.embeddings.collections import Collection
    from lightning_freescale.embeddings.overlap import OverlapEngine
    from lightning_freescale.embeddings.parameter_groups import ParameterGroups
    from lightning_freescale.embeddings.plain_embedding import EmbeddingChoice
    from lightning_freescale.embeddings.sharding import TableSharding
    from lightning_freescale.embeddings.shards import ShardedTables
    from lightning_freescale.profiling.recording.timeline import Timeline
    from lightning_freescale.training.table_step import TableStep

Shard: TypeAlias = Sequence[str] | Literal["auto"] | None
"""Which plain ``nn.Embedding`` modules to shard, see :func:`.choose_embeddings`."""
Found: TypeAlias = "list[tuple[Collection, Any]]"
"""The collections of a module, each with the module that stands there now."""


class TableStrategy:
    """The options of every strategy with sharded tables, and what users do with the tables between steps.

    Attributes:
        tables: the sharded tables; None if the module has none.
        table_step: the step of these tables in the current run; None outside of one.
        no_overlap: the option that prevents overlapped exchanges; empty if there is none.
    """

    tables: ShardedTables | None = None
    table_step: TableStep | None = None
    at_teardown: ExitStack
    # from the other base class of a subclass
    group_timeout: timedelta
    num_nodes: int
    if TYPE_CHECKING:

        @property
        def num_processes(self) -> int:
            """The number of ranks on this node."""

    def set_options(
        self,
        plan: Any,
        transport: str,
        overlap: bool,
        dedup: bool,
        ids_of: Callable[[Any], Any] | None,
        shard: Shard,
        split_backward: bool,
        exchange: str,
    ) -> None:
        """Check and keep the options.

        Raises:
            ValueError: there is no such transport or exchange, or an option would have no effect beside another.
            TypeError: ``ids_of`` is no function, or ``shard`` no list.
        """
        if exchange not in ("flat", "two_level", "torchrec"):
            raise ValueError(f"FreeScaleStrategy(exchange={exchange!r}): pass 'flat', 'two_level' or 'torchrec'")
        if exchange == "two_level" and not dedup:
            raise ValueError(
                "FreeScaleStrategy(exchange='two_level', dedup=False): sums within a node first are not bitwise TorchRec's. "
                "Leave one of the two out"
            )
        by_torchrec = exchange == "torchrec"
        option = "exchange='torchrec'" if by_torchrec else "" if overlap else "overlap=False"
        self.no_overlap = f"FreeScaleStrategy({option}) hides no exchange" if option else ""
        _refuse_without_effect(ids_of, split_backward, self.no_overlap)
        _refuse_shard(shard)
        self.plan, self.transport = plan, ProcessGroupFreeScaleOptions(transport).transport
        self.overlap, self.dedup, self.ids_of, self.shard = not self.no_overlap, dedup, ids_of, shard
        self.split_backward, self.exchange = split_backward, exchange

    @property
    def engine(self) -> OverlapEngine | None:
        """The exchange of the tables' rows; None if TorchRec exchanges them, and outside of a run."""
        return None if self.table_step is None else self.table_step.engine

    def drain(self) -> None:
        """Wait until every update of the steps so far is in the tables: before reading them by hand, on every rank."""
        if self.table_step is not None:
            self.table_step.drain()

    def writing_tables(self) -> AbstractContextManager[None]:
        """Enter this around writes to the tables by hand, on every rank.

        Updates under way come first, rows fetched ahead are void.
        """
        return nullcontext() if self.table_step is None else self.table_step.writing()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Enter this around lookups outside of training steps where ranks may make different numbers of them, on every rank.

        A rank that leaves it first gives the others their rows until all have left it. The Trainer's loops of validation, test
        and prediction need it not.
        """
        yield
        self.serve_evaluation()

    def serve_evaluation(self) -> None:
        """Give the other ranks the rows that they look up outside of steps, until every rank has called this method."""
        if self.engine is not None:
            self.engine.serve_evaluation()

    def full_weight(self, path: str) -> Tensor:
        """Return a copy of a whole sharded table on every rank, shape ``[rows, dim]``, without gradient. Collective.

        Updates under way are in it; later ones are not.

        Args:
            path: the table's name in the module's state dict, such as ``"item_emb"`` for an ``nn.Embedding`` or
                ``"net.items.embeddings.item"`` for a table of an EmbeddingCollection.

        Raises:
            ValueError: no sharded table has that name.
        """
        if self.tables is None:
            raise ValueError(f"full_weight({path!r}): the module has no sharded tables, read the parameter itself")
        self.drain()
        return self.tables.full_weight(path)


def _refuse_without_effect(ids_of: Any, split_backward: bool, no_overlap: str) -> None:
    if ids_of is not None and not callable(ids_of):
        raise TypeError(f"FreeScaleStrategy(ids_of={ids_of!r}): pass a function of the batch that returns a KeyedJaggedTensor")
    if no_overlap and ids_of is not None:
        raise ValueError(f"FreeScaleStrategy(ids_of=...): {no_overlap}, so the next ids have no use. Leave one of the two out")
    if split_backward and no_overlap:
        raise ValueError(
            f"FreeScaleStrategy(split_backward={split_backward!r}): {no_overlap}, so nothing travels while backward computes "
            "the gradients of the weights. Leave one of the two out"
        )


def _refuse_shard(shard: Any) -> None:
    if shard is None or shard == "auto":
        return
    if isinstance(shard, str) or not isinstance(shard, Sequence) or not all(isinstance(path, str) for path in shard):
        example = f"[{shard!r}]" if isinstance(shard, str) else "['item_emb']"
        raise TypeError(f"FreeScaleStrategy(shard={shard!r}): pass a list of paths, such as {example}, or 'auto'")


def refuse_unknown_options(given: Iterable[str], strategy: type) -> None:
    """Refuse what neither ``strategy``, nor a class it is built on, nor DistributedDataParallel takes.

    Raises:
        TypeError: names the option and the one that is spelled most like it.
    """
    takers = [vars(each)["__init__"] for each in strategy.__mro__[:-1] if "__init__" in vars(each)]
    names = {name for taker in (*takers, DistributedDataParallel) for name in signature(taker).parameters}
    names -= {"self", "ddp_options", "kwargs", "module", "device_ids"}
    for option in given:
        if option not in names:
            near = get_close_matches(option, names, n=1)
            meant = f"did you mean {near[0]}=?" if near else "see its docstring and DistributedDataParallel's"
            raise TypeError(f"FreeScaleStrategy({option}=...): there is no such option, {meant}")


def refuse_ddp_options(start_method: str, model_averaging_period: int | None = None) -> None:
    """Refuse options of DDPStrategy that do not go with sharded tables, by a ValueError."""
    if start_method != "popen":
        raise ValueError(
            f"FreeScaleStrategy(start_method={start_method!r}) would bring shards back to the main process, which cannot hold "
            "them. Leave start_method out and run a script, or use torchrun"
        )
    if model_averaging_period is not None:
        raise ValueError(
            f"FreeScaleStrategy(model_averaging_period={model_averaging_period!r}): local SGD lets dense parameters differ "
            "between ranks, which sharded tables cannot. Remove it"
        )


def refuse_shared_gpu(error: RuntimeError) -> None:
    """Raise a RuntimeError with the fix if NCCL has failed because several ranks run on one GPU."""
    if "Duplicate GPU detected" in str(error):
        raise RuntimeError(
            'several ranks run on one GPU, which NCCL refuses: FreeScaleStrategy(process_group_backend="gloo"), or a GPU for '
            "each rank"
        ) from error


# -- parts of the set-up, in their order


def collections_of(module: nn.Module | None, shard: Shard, warn: bool = False, advise: str = "") -> Found:
    """Return the embedding collections of a module, see :func:`.find_collections`; none without TorchRec.

    Args:
        module: the module.
        shard: plain ``nn.Embedding`` modules to shard as well.
        warn: whether to warn of collections that cannot be sharded, and to log that there are none.
        advise: the name of the strategy, to log which large ``nn.Embedding`` modules it shards or could shard.

    Raises:
        ValueError: an ``nn.Embedding`` that ``shard`` names cannot be sharded.
        ModuleNotFoundError: ``shard`` asks for TorchRec's tables, and TorchRec is not there.
    """
    found: Found = []
    if module is not None and (find_spec("torchrec") is not None or shard):
        from lightning_freescale.embeddings.collections import find_collections, unsupported_collections
        from lightning_freescale.embeddings.plain_embedding import choose_embeddings

        choice = choose_embeddings(module, shard)
        found = find_collections(module, set(choice.chosen.values()))
        for path in unsupported_collections(module, found) if warn else ():
            rank_zero_warn(f"embedding collection {path!r} is of a kind that cannot be sharded: it is replicated as with 'ddp'")
        if advise:
            _tell_embeddings(choice, shard, found, advise)
    if warn and not found:
        rank_zero_info("strategy 'freescale': no embedding collection to shard in the module, it trains as with 'ddp'")
    return found


def _tell_embeddings(choice: EmbeddingChoice, shard: Shard, found: Found, strategy: str) -> None:
    """Say which large ``nn.Embedding`` modules are not sharded although they could be, or what ``shard="auto"`` does."""
    from lightning_freescale.embeddings.plain_embedding import LARGE_EMBEDDING

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


@contextmanager
def table_sharding(module: nn.Module, device: torch.device, strategy: TableStrategy, found: Found) -> Iterator[TableSharding]:
    """Take the collections ``found`` out of their module, and put them back if the block raises; it shards them."""
    from lightning_freescale.embeddings.sharding import TableSharding

    sharding = TableSharding(module, device, strategy.exchange != "torchrec", found)
    try:
        yield sharding
    except BaseException:
        sharding.restore()
        raise


def shard_tables(
    sharding: TableSharding,
    groups: ParameterGroups | None,
    earlier: ShardedTables | None,
    strategy: TableStrategy,
) -> ShardedTables:
    """Shard the tables, each with the optimizer that ``groups`` has for it, if any. Collective.

    Args:
        sharding: the tables, taken out of their module.
        groups: the parameter groups of the user's optimizer; None without one.
        earlier: the tables as an earlier run has sharded them; their process group is used again if it fits.
        strategy: its options plan the tables, and move rows in TorchRec's own exchanges, which have a process group of
            their own. The default group stays as Lightning made it.
    """
    optimizers = sharding.in_backward if groups is None else groups.optimizers
    lazy = [] if groups is None else sorted(key for key, how in optimizers.items() if how.moves_without_gradient)
    if lazy:
        kinds = " and ".join(sorted({optimizers[key].fused_class.__name__ for key in lazy}))
        rank_zero_info(
            f"strategy 'freescale': {kinds} updates only the rows of tables {lazy} that a step looks up, as TorchRec and "
            "torch.optim.SparseAdam do. Under 'ddp' the dense optimizer moves all other rows in every step, too: expect other "
            "weights there, unless the loss is over all rows of the table"
        )
    # training waits for these exchanges and nothing computes beside them: NCCL is faster then. The other transports are for
    # the overlapped exchange, whose collections have groups of their own
    transport = "native" if strategy.transport == "auto" and sharding.device.type == "cuda" else strategy.transport
    options = LazyGlooOptions(transport, name="embedding", priority=1)
    group = earlier.group if earlier is not None else None
    if not isinstance(group, ProcessGroupFreeScale) or group.options != options:
        group = cast("dist.ProcessGroup", dist.new_group(backend=BACKEND, timeout=strategy.group_timeout, pg_options=options))
    return sharding.shard(group=group, local_world_size=strategy.num_processes, plan=strategy.plan, optimizers=optimizers)


def wrap_dense(module: nn.Module, sharded: Group[str], device_ids: list[int] | None, options: dict[str, Any]) -> nn.Module:
    """Wrap ``module`` into DistributedDataParallel on the default group, without the parameters named ``sharded``. Collective.

    A module whose only trainable parameters are sharded is returned as it is, with rank 0's dense parameters.
    """
    if not any(p.requires_grad for name, p in module.named_parameters() if name not in sharded):
        sync_dense(module, sharded)
        return module
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(sharded))
    return DistributedDataParallel(module, device_ids=device_ids, **options)


def sync_dense(module: nn.Module, sharded: Group[str]) -> None:
    """Copy rank 0's dense parameters and buffers to all ranks, where no DistributedDataParallel does it. Collective."""
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

    engine = None if strategy.exchange == "torchrec" else _new_engine(tables, strategy, clips)
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

    exchange, nodes, ranks = strategy.exchange, strategy.num_nodes, strategy.num_processes
    if exchange == "two_level" and 1 in (nodes, ranks):
        rank_zero_info(
            f"strategy 'freescale': exchange='two_level' with num_nodes={nodes} and {ranks} ranks each is the flat exchange: "
            "it takes several of both"
        )
        exchange = "flat"
    clips = {**clips, "exchange": exchange, "ranks_per_node": ranks}
    return OverlapEngine(tables, strategy.dedup, strategy.group_timeout, strategy.transport, **clips)
