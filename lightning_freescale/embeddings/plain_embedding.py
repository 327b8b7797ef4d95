"""Sharding of plain ``nn.Embedding`` modules.

A sharded ``nn.Embedding`` is TorchRec's EmbeddingCollection of one table with the interface of the plain module. The user's
code does not change: the module accepts ids of any shape and returns rows, and the weight keeps its name.
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
from torchrec.modules.embedding_configs import DataType
from typing_extensions import override

from lightning_freescale.embeddings.catalogue_weight import CatalogueWeight

LARGE_EMBEDDING = 1_000_000
"""The number of elements from which ``shard="auto"`` shards a table. With 4 MB, DDP's reduction of the gradient is slow."""


class EmbeddingChoice(NamedTuple):
    """The ``nn.Embedding`` modules of a module, by path."""

    chosen: dict[str, nn.Embedding]  # modules to shard
    left: dict[str, nn.Embedding]  # large modules that are not sharded but could be
    unshardable: dict[str, str]  # reasons why large modules cannot be sharded


def choose_embeddings(root: nn.Module, shard: Sequence[str] | Literal["auto"] | None) -> EmbeddingChoice:
    """Choose the ``nn.Embedding`` modules under ``root``, unsharded or sharded earlier, to shard.

    ``shard`` has paths, or is ``"auto"`` for modules with at least :data:`LARGE_EMBEDDING` elements. The function raises a
    ValueError if there is no ``nn.Embedding`` at a path, or if the sharded module would not be equivalent.
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
        if hasattr(module, "freescale_sharding"):  # sharded by an earlier fit
            continue
        path = first_path.get(module) if isinstance(module, nn.Embedding) else None
        if path is None:
            raise ValueError(f"FreeScaleStrategy(shard=[{given!r}]): {_missing(given, held, plain)}")
        if (reason := obstacles[path]) is not None:
            raise ValueError(f"FreeScaleStrategy(shard=[{given!r}]): {reason}, or remove {given!r} from shard=.")
        chosen[path] = plain[path]
    return EmbeddingChoice(chosen, {}, {})


def _plain_embeddings(root: nn.Module) -> dict[str, nn.Embedding]:
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
    """Return the modules of each table, by the first path. Modules with a common weight look up the same table."""
    found: dict[tuple[int, int | None], dict[str, nn.Embedding]] = {}
    for path, module in plain.items():
        key = id(_weight_of(module) if _weight_of(module) is not None else module), module.padding_idx
        found.setdefault(key, {})[path] = module
    return {next(iter(tied)): tied for tied in found.values()}


def _weight_of(module: nn.Module) -> nn.Parameter | None:
    return module._parameters.get("weight")


def tied_modules(root: nn.Module, weight: nn.Parameter | None) -> list[str]:
    """Return the paths of other modules under ``root`` with the weight of an ``nn.Embedding``, such as an output layer."""
    held = root.named_modules(remove_duplicate=False)
    return [path for path, module in held if _weight_of(module) is weight is not None and not isinstance(module, nn.Embedding)]


def _missing(path: str, held: Mapping[str, nn.Module], plain: Mapping[str, nn.Embedding]) -> str:
    choices = f"The nn.Embedding modules are {[*plain]}."
    if path not in held:
        near = get_close_matches(path, plain, n=1)
        return f"the module has no {path!r}. {f'Did you mean {near[0]!r}?' if near else choices}"
    if isinstance(held[path], nn.Embedding):
        return f"{path!r} belongs to a module of TorchRec, which is sharded as a whole. Remove it from shard=."
    return f"{path!r} is a {type(held[path]).__name__} and not an nn.Embedding. {choices}"


def _obstacle_of_table(root: nn.Module, tied: Mapping[str, nn.Embedding]) -> str | None:
    """Return why a sharded table would not be equivalent to the modules of one weight, with a fix; None if it would be."""
    shared = len(tied) > 1 or any(tied_modules(root, _weight_of(module)) for module in tied.values())
    if shared and any(module.weight.is_meta for module in tied.values()):
        return f"{[*tied]} share a weight on the meta device, but cannot be initialised together. Build them on the CPU"
    obstacles = (_obstacle(path, module) or _other_use(root, path, module, tied) for path, module in tied.items())
    return next((reason for reason in obstacles if reason is not None), None)


def _obstacle(path: str, module: nn.Embedding) -> str | None:
    """Return a feature of ``module`` that a sharded table does not support, with a fix; None if there is none."""
    kind, weight, own = type(module), module._parameters.get("weight"), _own_methods(module)
    if own - {"reset_parameters"} or weight is None:
        return f"{path!r} is a {kind.__name__}, which overrides {sorted(own)}. Use a plain nn.Embedding"
    if own and weight.is_meta:
        return f"{path!r} is a {kind.__name__} on the meta device with its own reset_parameters. Build it on the CPU"
    if module.max_norm is not None:
        return f"{path!r} has max_norm={module.max_norm!r}, which changes rows during the lookup. Build it without max_norm"
    if module.scale_grad_by_freq:
        return f"{path!r} has scale_grad_by_freq=True, which needs the ids of all ranks. Build it without scale_grad_by_freq"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{path!r} has dtype {weight.dtype}, but tables need torch.float32, torch.bfloat16 or torch.float16. Convert it"
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return f"{path!r} has hooks, which a sharded table would not run. Remove them"
    return None


def _other_use(root: nn.Module, path: str, module: nn.Embedding, tied: Mapping[str, nn.Embedding]) -> str | None:
    """Return an unsupported use of the weight of ``module`` outside of ``tied``, with a fix; None if there is none."""
    for holder, other in root.named_modules():
        for name, parameter in other.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is module.weight and other not in tied.values():
                also = f"the weight of {path!r} is also {(f'{holder}.{name}' if holder else name)!r}"
                if isinstance(other, nn.Embedding) and other.padding_idx != module.padding_idx:
                    return f"{also}, but padding_idx is {module.padding_idx} and {other.padding_idx}. Use one padding_idx"
                if isinstance(other, nn.Embedding) or name != "weight":
                    return f"{also}, and only a module that has it as its 'weight' can share it. Rename or untie it"
    return None


def _own_methods(module: nn.Embedding) -> set[str]:
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Embedding)]
    defined = [item for each in (module, *classes) for item in vars(each).items()]
    return {name for name, value in defined if isinstance(value, (FunctionType, MethodType, property))} - {"__init__"}


class EmbeddingIds(KeyedJaggedTensor):
    """The ids of one call of the embedding at ``path`` in TorchRec's form: one feature, named ``path``, of one sample."""

    def __init__(self, path: str, ids: Tensor) -> None:
        count = ids.numel()
        # fill lengths on the device and pass them as Python numbers, too, so that the host does not wait for the device
        lengths = torch.full((1,), count, dtype=torch.int64, device=ids.device)
        super().__init__([path], ids.reshape(-1), lengths=lengths, stride=1, length_per_key=[count], offset_per_key=[0, count])
        self.ids = ids


class ShardedEmbedding(ShardedEmbeddingCollection):
    """TorchRec's sharded module for a result of :func:`as_collection`, with the interface of an ``nn.Embedding``.

    The caller may change the result of a call in place. The row ``padding_idx`` gets no gradient.
    """

    def __init__(self, module: EmbeddingCollection, *arguments: Any, dim: int, padding_idx: int | None, **options: Any) -> None:
        super().__init__(module, *arguments, **options)
        (config,) = module.embedding_configs()
        (self.path,) = config.feature_names
        self.num_embeddings, self.embedding_dim, self.padding_idx = config.num_embeddings, dim, padding_idx
        # TorchRec reads this rank's rows at embeddings.<table>.weight, but the module has them as its parameter ``weight``
        inner = self._modules.pop("embeddings")
        object.__setattr__(self, "embeddings", inner)
        self._parameters["weight"] = inner.get_submodule(config.name).get_parameter("weight")
        self._table_key = f"embeddings.{config.name}.weight"
        self._register_state_dict_hook(ShardedEmbedding._rename_saved)
        self._load_state_dict_pre_hooks.clear()  # the next hook calls TorchRec's hook
        self._register_load_state_dict_pre_hook(ShardedEmbedding._rename_loaded, with_module=True)

    @override
    def __call__(self, ids: Tensor) -> Tensor:
        """Return the rows of ``ids``, integers of any shape, as ``[*ids.shape, dim]``, in the dtype of the weight."""
        if not isinstance(ids, Tensor):
            raise TypeError(f"embedding {self.path!r} got a {type(ids).__name__}. Pass a tensor of ids.")
        found = super().__call__(EmbeddingIds(self.path, ids))[self.path].values().to(self._parameters["weight"].dtype)
        return rows_of_ids(found, ids, self.embedding_dim, self.padding_idx)

    @override
    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            return self.catalogue_weight()
        return super().__getattr__(name)

    def catalogue_weight(self) -> CatalogueWeight:
        """Return the placeholder for the whole weight in the model's code."""
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
    """A sharder that builds a :class:`ShardedEmbedding` from a result of :func:`as_collection`."""

    def __init__(self, dim: int, padding_idx: int | None) -> None:
        super().__init__()
        self.dim, self.padding_idx = dim, padding_idx

    @override
    def shard(self, module: EmbeddingCollection, params: Any, env: Any, device: Any = None, module_fqn: Any = None) -> Any:
        return ShardedEmbedding(module, params, env, self.fused_params, device, dim=self.dim, padding_idx=self.padding_idx)


def table_name(path: str) -> str:
    """Return the table name of the embedding at ``path``. torch allows no dots and no names of methods."""
    name = path.replace(".", "/")
    return f"{name}/" if hasattr(nn.ModuleDict(), name) else name


def as_collection(path: str, rows: int, dim: int, data_type: DataType = DataType.FP32) -> EmbeddingCollection:
    """Return an EmbeddingCollection of one table for the ``nn.Embedding`` at ``path``, on the meta device."""
    config = EmbeddingConfig(
        name=table_name(path), num_embeddings=rows, embedding_dim=dim, data_type=data_type, feature_names=[path]
    )
    return EmbeddingCollection(tables=[config], device=torch.device("meta"))


def rows_of_ids(found: Tensor, ids: Tensor, dim: int, padding_idx: int | None) -> Tensor:
    """Return the rows ``found`` of an :class:`EmbeddingIds` in the form of an ``nn.Embedding``, shape ``[*ids.shape, dim]``.

    Columns of ``found`` after ``dim`` are the kernel's padding.
    """
    if found.shape[1] != dim:
        found = found[:, :dim]
    shape = (*ids.shape, dim)
    # the caller may change the result in place. Autograd forbids this for a view of TorchRec's result, so clone a view
    rows = found.view(shape).clone() if found._is_view() else torch.ops.aten._unsafe_view(found, shape)
    if padding_idx is not None and rows.requires_grad:
        rows = _WithoutPadding.apply(rows, (ids == padding_idx).unsqueeze(-1))
    return rows


class _WithoutPadding(torch.autograd.Function):
    # backward replaces the gradient of the padding row by zeros, also if it is infinite. A factor of zero would return NaN, and
    # a hook would be lost if the rows are changed in place. mark_dirty avoids a copy of the rows

    @staticmethod
    def forward(ctx: Any, rows: Tensor, padded: Tensor) -> Tensor:
        ctx.padded = padded
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.masked_fill(ctx.padded, 0.0), None
