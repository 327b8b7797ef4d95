"""The plain ``nn.Embedding`` modules of a module: which are sharded, and how a sharded one behaves.

A sharded one is TorchRec's EmbeddingCollection of one table, called and saved as the plain module. No forward of the user's has
to change: ids of any shape go in, rows come out, and the weight keeps its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from typing_extensions import override

from lightning_freescale.embeddings.catalogue_weight import CatalogueWeight

LARGE_EMBEDDING = 1_000_000
"""Numbers in a table from which on ``shard="auto"`` shards it: with 4 MB, DDP's reduction of its dense gradient takes time."""


class EmbeddingChoice(NamedTuple):
    """The ``nn.Embedding`` modules of a module.

    Attributes:
        chosen: those to shard, by path.
        left: large ones that are not sharded and could be, by path.
        unshardable: large ones that cannot be, by path, with the reason.
    """

    chosen: dict[str, nn.Embedding]
    left: dict[str, nn.Embedding]
    unshardable: dict[str, str]


def choose_embeddings(root: nn.Module, shard: Sequence[str] | Literal["auto"] | None) -> EmbeddingChoice:
    """Return which of the ``nn.Embedding`` modules under ``root`` are to be sharded.

    Args:
        root: the module, unsharded or sharded earlier.
        shard: paths in it; ``"auto"`` for those of :data:`LARGE_EMBEDDING` numbers or more that can be sharded; or None.

    Raises:
        ValueError: there is no ``nn.Embedding`` at a path, or it would not be the same sharded; says why, and the fix.
    """
    plain = _plain_embeddings(root)
    tables = _tables(plain)
    obstacles = {path: _obstacle_of_table(root, tied) for path, tied in tables.items()}
    firsts = {path: plain[path] for path in tables}
    large = {path: module for path, module in firsts.items() if module.num_embeddings * module.embedding_dim >= LARGE_EMBEDDING}
    free = {path: module for path, module in large.items() if obstacles[path] is None}
    unshardable = {path: reason for path in large if (reason := obstacles[path]) is not None}
    if shard is None or shard == "auto":
        return EmbeddingChoice(free, {}, unshardable) if shard else EmbeddingChoice({}, free, {})
    held, chosen = dict(root.named_modules(remove_duplicate=False)), {}
    first_path = {module: path for path, tied in tables.items() for module in tied.values()}
    for given in shard:
        module = held.get(given)
        if hasattr(module, "freescale_sharding"):  # by an earlier fit
            continue
        path = first_path.get(module) if isinstance(module, nn.Embedding) else None
        if path is None:
            raise ValueError(f"FreeScaleStrategy(shard=[{given!r}]): {_missing(given, held, plain)}")
        if (reason := obstacles[path]) is not None:
            raise ValueError(f"FreeScaleStrategy(shard=[{given!r}]): {reason}, or leave {given!r} out of shard=")
        chosen[path] = plain[path]
    return EmbeddingChoice(chosen, {}, {})


def _plain_embeddings(root: nn.Module) -> dict[str, nn.Embedding]:
    """Return the modules by path that are no part of one of TorchRec's."""
    found: dict[str, nn.Embedding] = {}
    inside: str | None = None
    for path, module in root.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        inside = f"{path}." if type(module).__module__.startswith("torchrec.") and path else None
        if isinstance(module, nn.Embedding):
            found[path] = module
    return found


def _tables(plain: Mapping[str, nn.Embedding]) -> dict[str, dict[str, nn.Embedding]]:
    """Return the modules of each table by its first path: several that share a weight look up one table."""
    found: dict[tuple[int, int | None], dict[str, nn.Embedding]] = {}
    for path, module in plain.items():
        key = id(_weight_of(module) if _weight_of(module) is not None else module), module.padding_idx
        found.setdefault(key, {})[path] = module
    return {next(iter(tied)): tied for tied in found.values()}


def _weight_of(module: nn.Module) -> nn.Parameter | None:
    return module._parameters.get("weight")


def tied_modules(root: nn.Module, weight: nn.Parameter | None) -> list[str]:
    """Return the paths of the modules under ``root`` that have the weight of an ``nn.Embedding`` as theirs, such as a head."""
    held = root.named_modules(remove_duplicate=False)
    return [path for path, module in held if _weight_of(module) is weight is not None and not isinstance(module, nn.Embedding)]


def _missing(path: str, held: Mapping[str, nn.Module], plain: Mapping[str, nn.Embedding]) -> str:
    """Say why the module at a path, if there is one, cannot be chosen."""
    ways = f"its nn.Embedding modules are {[*plain]}"
    if path not in held:
        near = get_close_matches(path, plain, n=1)
        return f"the module has no {path!r}, {f'did you mean {near[0]!r}?' if near else ways}"
    if isinstance(held[path], nn.Embedding):
        return f"{path!r} belongs to a module of TorchRec, which is sharded as a whole: leave it out"
    return f"{path!r} is a {type(held[path]).__name__}, no nn.Embedding: {ways}"


def _obstacle_of_table(root: nn.Module, tied: Mapping[str, nn.Embedding]) -> str | None:
    """Return why a sharded table would not do what the modules of one weight do, and a fix; None if it would."""
    shared = len(tied) > 1 or any(tied_modules(root, _weight_of(module)) for module in tied.values())
    if shared and any(module.weight.is_meta for module in tied.values()):
        return f"{[*tied]} share a weight on the meta device, where they cannot be initialised as one: build it on the CPU"
    obstacles = (_obstacle(path, module) or _other_use(root, path, module, tied) for path, module in tied.items())
    return next((reason for reason in obstacles if reason is not None), None)


def _obstacle(path: str, module: nn.Embedding) -> str | None:
    """Return what ``module`` does that a sharded table would not, and a fix; None if there is nothing."""
    kind, weight, own = type(module), module._parameters.get("weight"), _own_methods(module)
    if own - {"reset_parameters"} or weight is None:
        return f"{path!r} is a {kind.__name__}, which has {sorted(own)} of its own: use a plain nn.Embedding"
    if own and weight.is_meta:
        return f"{path!r} is a {kind.__name__} on the meta device with its own reset_parameters: build it on the CPU"
    if module.max_norm is not None:
        return f"{path!r} has max_norm={module.max_norm!r}, which changes rows when they are looked up: build it without"
    if module.scale_grad_by_freq:
        return f"{path!r} has scale_grad_by_freq=True, but ranks would have to count the ids of all: build it without"
    if weight.dtype != torch.float32:
        return f"{path!r} is of {weight.dtype}, but tables are of torch.float32: convert it"
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return f"{path!r} has hooks, which a sharded table would not run: remove them"
    return None


def _other_use(root: nn.Module, path: str, module: nn.Embedding, tied: Mapping[str, nn.Embedding]) -> str | None:
    """Return which module that is not ``tied`` to it has the weight of ``module`` otherwise than as its weight, and a fix."""
    for holder, other in root.named_modules():
        for name, parameter in other.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is module.weight and other not in tied.values():
                also = f"the weight of {path!r} is also {(f'{holder}.{name}' if holder else name)!r}"
                if isinstance(other, nn.Embedding) and other.padding_idx != module.padding_idx:
                    return f"{also}, but padding_idx is {module.padding_idx} and {other.padding_idx}: give both the same"
                if isinstance(other, nn.Embedding) or name != "weight":
                    return f"{also}, and only a module that has it as its 'weight' can share it: name it so, or untie them"
    return None


def _own_methods(module: nn.Embedding) -> set[str]:
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Embedding)]
    defined = [item for each in (module, *classes) for item in vars(each).items()]
    return {name for name, value in defined if isinstance(value, (FunctionType, MethodType, property))} - {"__init__"}


class EmbeddingIds(KeyedJaggedTensor):
    """The ids of one call of an embedding, as TorchRec takes them: one feature of one sample that has them all.

    Args:
        path: of the embedding in the module; the feature's name.
        ids: integers of any shape.

    Attributes:
        ids: the tensor as it was given.
    """

    def __init__(self, path: str, ids: Tensor) -> None:
        count = ids.numel()
        # filled on the device, and said again in numbers: the host does not wait to learn them
        lengths = torch.full((1,), count, dtype=torch.int64, device=ids.device)
        super().__init__([path], ids.reshape(-1), lengths=lengths, stride=1, length_per_key=[count], offset_per_key=[0, count])
        self.ids = ids


class ShardedEmbedding(ShardedEmbeddingCollection):
    """Stands where an ``nn.Embedding`` stood: what TorchRec makes of :func:`as_collection` of it, with its calls and names.

    The result of a call is the caller's to change, as that of an ``nn.Embedding``; the row ``padding_idx`` gets no gradient.

    Attributes:
        num_embeddings: rows of the whole table.
        embedding_dim: width of a row.
        padding_idx: the row that is never updated; None if there is none.
    """

    def __init__(self, module: EmbeddingCollection, *arguments: Any, dim: int, padding_idx: int | None, **options: Any) -> None:
        super().__init__(module, *arguments, **options)
        (config,) = module.embedding_configs()
        (self.path,) = config.feature_names
        self.num_embeddings, self.embedding_dim, self.padding_idx = config.num_embeddings, dim, padding_idx
        # TorchRec finds this rank's rows at embeddings.<table>.weight; to torch they are the module's own parameter
        inner = self._modules.pop("embeddings")
        object.__setattr__(self, "embeddings", inner)
        self._parameters["weight"] = inner.get_submodule(config.name).get_parameter("weight")
        self._table_key = f"embeddings.{config.name}.weight"
        self._register_state_dict_hook(ShardedEmbedding._rename_saved)
        self._load_state_dict_pre_hooks.clear()  # TorchRec's, which the next one calls
        self._register_load_state_dict_pre_hook(ShardedEmbedding._rename_loaded, with_module=True)

    @override
    def __call__(self, ids: Tensor) -> Tensor:
        """Return the rows of ``ids``, integers of any shape, as ``[*ids.shape, dim]``.

        Raises:
            TypeError: ``ids`` is no tensor.
        """
        if not isinstance(ids, Tensor):
            raise TypeError(f"embedding {self.path!r} is given a {type(ids).__name__}: pass a tensor of ids")
        found = super().__call__(EmbeddingIds(self.path, ids))[self.path].values()
        return rows_of_ids(found, ids, self.embedding_dim, self.padding_idx)

    @override
    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            return self.catalogue_weight()
        return super().__getattr__(name)

    def catalogue_weight(self) -> CatalogueWeight:
        """Return what stands for the whole weight in the model's code."""
        return CatalogueWeight(self._parameters["weight"], self.path, range(self.num_embeddings), self.embedding_dim)

    @override
    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"

    @staticmethod
    def _rename_saved(module: ShardedEmbedding, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}{module._table_key}")

    @staticmethod
    def _rename_loaded(module: ShardedEmbedding, state: dict[str, Any], prefix: str, *others: Any) -> None:
        if f"{prefix}weight" in state:
            state[f"{prefix}{module._table_key}"] = state.pop(f"{prefix}weight")
            module._pre_load_state_dict_hook(module, state, prefix, *others)
            state[f"{prefix}weight"] = state.pop(f"{prefix}{module._table_key}")


class EmbeddingSharder(EmbeddingCollectionSharder):
    """Makes a :class:`ShardedEmbedding` of what :func:`as_collection` has made of an ``nn.Embedding``."""

    def __init__(self, dim: int, padding_idx: int | None) -> None:
        super().__init__()
        self.dim, self.padding_idx = dim, padding_idx

    @override
    def shard(self, module: EmbeddingCollection, params: Any, env: Any, device: Any = None, module_fqn: Any = None) -> Any:
        return ShardedEmbedding(module, params, env, self.fused_params, device, dim=self.dim, padding_idx=self.padding_idx)


def table_name(path: str) -> str:
    """Return the name of the table of the embedding at ``path``; torch takes no dots in it, and no name of a method."""
    name = path.replace(".", "/")
    return f"{name}/" if hasattr(nn.ModuleDict(), name) else name


def as_collection(path: str, rows: int, dim: int) -> EmbeddingCollection:
    """Return an EmbeddingCollection of one table for the ``nn.Embedding`` at ``path``, on the meta device."""
    config = EmbeddingConfig(name=table_name(path), num_embeddings=rows, embedding_dim=dim, feature_names=[path])
    return EmbeddingCollection(tables=[config], device=torch.device("meta"))


def rows_of_ids(found: Tensor, ids: Tensor, dim: int, padding_idx: int | None) -> Tensor:
    """Return the rows ``found`` for :class:`EmbeddingIds`, shape ``[ids.numel(), columns]``, as an ``nn.Embedding`` would.

    Columns behind ``dim`` are the kernel's padding, which TorchRec returns as well.
    """
    if found.shape[1] != dim:
        found = found[:, :dim]
    shape = (*ids.shape, dim)
    # a tensor of its own, which the caller may change: a view is one of what TorchRec has returned, which autograd forbids
    rows = found.view(shape).clone() if found._is_view() else torch.ops.aten._unsafe_view(found, shape)
    if padding_idx is not None and rows.requires_grad:
        rows = _WithoutPadding.apply(rows, (ids == padding_idx).unsqueeze(-1))
    return rows


class _WithoutPadding(torch.autograd.Function):
    # Its backward drops the gradient of the padding row, also one that is infinite: a factor of zero would not, and a hook is
    # lost where the rows are changed. It says that it changes them in place, which spares a copy

    @staticmethod
    def forward(ctx: Any, rows: Tensor, padded: Tensor) -> Tensor:
        ctx.padded = padded
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.masked_fill(ctx.padded, 0.0), None
