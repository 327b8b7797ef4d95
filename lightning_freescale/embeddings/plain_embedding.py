"""An ``nn.Embedding`` that is sharded: TorchRec's EmbeddingCollection of one table, called and saved as the plain module.

No forward of the user's has to change: ids of any shape go in, rows come out, and the weight keeps its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from typing_extensions import override

from lightning_freescale.embeddings.catalogue_weight import CatalogueWeight


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
