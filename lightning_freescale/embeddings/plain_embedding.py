"""Sharding of plain ``nn.Embedding`` and ``nn.EmbeddingBag`` modules.

A sharded plain module is TorchRec's EmbeddingCollection of one table with the interface of the plain module. The user's code
does not change, and the weight keeps its name. Both kinds look up the row of each id, and a bag pools the rows on its rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.modules.embedding_configs import DataType
from typing_extensions import override

from lightning_freescale._runtime.error_text import a
from lightning_freescale.embeddings.catalogue_weight import CatalogueWeight
from lightning_freescale.embeddings.collection_kinds import LARGE_EMBEDDING, PLAIN, hooks_of, open_modules, own_members

Plain: TypeAlias = "nn.Embedding | nn.EmbeddingBag"


class EmbeddingChoice(NamedTuple):
    """The plain modules of a module, by path."""

    chosen: dict[str, Plain]  # modules to shard
    left: dict[str, Plain]  # large modules that are not sharded but could be
    unshardable: dict[str, str]  # reasons why large modules cannot be sharded


def choose_embeddings(root: nn.Module, shard: Sequence[str] | Literal["auto"] | None) -> EmbeddingChoice:
    """Choose the plain modules under ``root``, unsharded or sharded earlier, to shard.

    ``shard`` has paths, or is ``"auto"`` for modules with at least :data:`LARGE_EMBEDDING` elements. The function raises a
    ValueError if there is no plain module at a path, or if the sharded module would not be equivalent.
    """
    plain = {path: module for path, module in open_modules(root) if isinstance(module, PLAIN)}
    tables = _tables(plain)
    obstacles = {path: _obstacle_of_table(root, tied) for path, tied in tables.items()}
    large = {path: plain[path] for path in tables if plain[path].num_embeddings * plain[path].embedding_dim >= LARGE_EMBEDDING}
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
        path = first_path.get(module) if isinstance(module, PLAIN) else None
        if path is None:
            raise ValueError(f"FreeScaleStrategy(shard=[{given!r}]): {_missing(given, held, plain)}")
        if (reason := obstacles[path]) is not None:
            raise ValueError(f"FreeScaleStrategy(shard=[{given!r}]): {reason}, or remove {given!r} from shard=.")
        chosen[path] = plain[path]
    return EmbeddingChoice(chosen, {}, {})


def options_of(module: Plain) -> dict[str, Any]:
    """Return torch's class of a plain module, and the options that its results depend on."""
    if isinstance(module, nn.Embedding):
        return {"class": "Embedding", "padding_idx": module.padding_idx}
    return {"class": "EmbeddingBag", "mode": module.mode, "include_last_offset": module.include_last_offset}


def _tables(plain: Mapping[str, Plain]) -> dict[str, dict[str, Plain]]:
    """Return the modules of each table, by the first path. Modules with a common weight look up the same table."""
    found: dict[tuple[int, str], dict[str, Plain]] = {}
    for path, module in plain.items():
        key = id(_weight_of(module) if _weight_of(module) is not None else module), f"{options_of(module)}"
        found.setdefault(key, {})[path] = module
    return {next(iter(tied)): tied for tied in found.values()}


def _weight_of(module: nn.Module) -> nn.Parameter | None:
    return module._parameters.get("weight")


def tied_modules(root: nn.Module, weight: nn.Parameter | None) -> list[str]:
    """Return the paths of other modules under ``root`` with the weight of a plain module, such as an output layer."""
    held = root.named_modules(remove_duplicate=False)
    return [path for path, module in held if _weight_of(module) is weight is not None and not isinstance(module, PLAIN)]


def _missing(path: str, held: Mapping[str, nn.Module], plain: Mapping[str, Plain]) -> str:
    choices = f"The nn.Embedding and nn.EmbeddingBag modules are {[*plain]}."
    if path not in held:
        near = get_close_matches(path, plain, n=1)
        return f"the module has no {path!r}. {f'Did you mean {near[0]!r}?' if near else choices}"
    if isinstance(held[path], PLAIN):
        return f"{path!r} belongs to a module of TorchRec, which is sharded as a whole. Remove it from shard=."
    return f"{path!r} is {a(type(held[path]))} and neither an nn.Embedding nor an nn.EmbeddingBag. {choices}"


def _obstacle_of_table(root: nn.Module, tied: Mapping[str, Plain]) -> str | None:
    """Return why a sharded table would not be equivalent to the modules of one weight, with a fix; None if it would be."""
    shared = len(tied) > 1 or any(tied_modules(root, _weight_of(module)) for module in tied.values())
    if shared and any(module.weight.is_meta for module in tied.values()):
        return f"{[*tied]} share a weight on the meta device, but cannot be initialised together. Build them on the CPU"
    usual = vars(nn.Embedding(1, 1, device="meta")).keys() | {"mode", "include_last_offset"}
    for path, module in tied.items() if len(tied) > 1 else ():
        if own := sorted(name for name in vars(module) if name not in usual and not name.startswith("_")):
            return f"{path!r} has attributes {own}, but one sharded module replaces {[*tied]}. Set them on another module"
    obstacles = (_obstacle(path, module) or _other_use(root, path, module, tied) for path, module in tied.items())
    return next((reason for reason in obstacles if reason is not None), None)


def _obstacle(path: str, module: Plain) -> str | None:
    """Return a feature of ``module`` that a sharded table does not support, with a fix; None if there is none."""
    kind, weight = options_of(module)["class"], _weight_of(module)
    own = own_members(module, getattr(nn, kind))
    if own - {"reset_parameters"} or weight is None:
        return f"{path!r} is {a(type(module))}, which overrides or adds {sorted(own)}. Use a plain nn.{kind}"
    if own and weight.is_meta:
        return f"{path!r} is {a(type(module))} on the meta device with its own reset_parameters. Build it on the CPU"
    if isinstance(module, nn.EmbeddingBag) and module.padding_idx is not None:
        return f"{path!r} has padding_idx={module.padding_idx}, which a sharded bag would not omit. Leave these ids out"
    if module.max_norm is not None:
        return f"{path!r} has max_norm={module.max_norm!r}, which changes rows during the lookup. Build it without max_norm"
    if module.scale_grad_by_freq:
        return f"{path!r} has scale_grad_by_freq=True, which needs the ids of all ranks. Build it without scale_grad_by_freq"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{path!r} has dtype {weight.dtype}, but tables need torch.float32, torch.bfloat16 or torch.float16. Convert it"
    if hooks := hooks_of(path, module):
        return f"{path!r} has hooks {hooks}, which a sharded table would not run. Remove them"
    return None


def _other_use(root: nn.Module, path: str, module: Plain, tied: Mapping[str, Plain]) -> str | None:
    """Return an unsupported use of the weight of ``module`` outside of ``tied``, with a fix; None if there is none."""
    for holder, other in root.named_modules():
        for name, parameter in other.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is module.weight and other not in tied.values():
                also = f"the weight of {path!r} is also {(f'{holder}.{name}' if holder else name)!r}"
                mine, others = options_of(module), options_of(other) if isinstance(other, PLAIN) else {}
                if others and (differing := [option for option in mine if mine[option] != others.get(option)]):
                    first = differing[0]
                    return f"{also}, but {first} is {mine[first]} and {others[first]}. Use one {first}"
                if isinstance(other, PLAIN) or name != "weight":
                    return f"{also}, and only a module that has it as its 'weight' can share it. Rename or untie it"
    return None


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

    def __init__(self, module: Any, *arguments: Any, dim: int, padding_idx: int | None = None, **options: Any) -> None:
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
    def __call__(self, input: Tensor) -> Tensor:
        """Return the rows of ids, integers of any shape, as ``[*input.shape, dim]``, in the dtype of the weight."""
        if not isinstance(input, Tensor):
            raise TypeError(f"embedding {self.path!r} got {a(type(input))}. Pass a tensor of ids.")
        found = super().__call__(EmbeddingIds(self.path, input))[self.path].values().to(self._parameters["weight"].dtype)
        return rows_of_ids(found, input, self.embedding_dim, self.padding_idx)

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


class ShardedEmbeddingBag(ShardedEmbedding):
    """A :class:`ShardedEmbedding` with the interface of an ``nn.EmbeddingBag``."""

    def __init__(self, *arguments: Any, mode: str, include_last_offset: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.mode, self.include_last_offset = mode, include_last_offset

    @override
    def __call__(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return the pooled rows of each bag, shape ``[bags, dim]``."""
        rows = super().__call__(input).view(-1, self.embedding_dim)
        places = torch.arange(len(rows), dtype=input.dtype, device=input.device).view(input.shape)
        options: Any = {"per_sample_weights": per_sample_weights, "include_last_offset": self.include_last_offset}
        return F.embedding_bag(places, rows, offsets, mode=self.mode, **options)


class EmbeddingSharder(EmbeddingCollectionSharder):
    """A sharder that builds the sharded module of a plain module with ``options`` from a result of :func:`as_collection`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._kind, self._options = ShardedEmbeddingBag if "mode" in options else ShardedEmbedding, options

    @override
    def shard(self, module: EmbeddingCollection, params: Any, env: Any, device: Any = None, module_fqn: Any = None) -> Any:
        return self._kind(module, params, env, self.fused_params, device, **self._options)


def table_name(path: str) -> str:
    """Return the table name of the embedding at ``path``. torch allows no dots and no names of methods."""
    name = path.replace(".", "/")
    return f"{name}/" if hasattr(nn.ModuleDict(), name) else name


def as_collection(path: str, rows: int, dim: int, data_type: DataType = DataType.FP32) -> EmbeddingCollection:
    """Return an EmbeddingCollection of one table for the plain module at ``path``, on the meta device."""
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
