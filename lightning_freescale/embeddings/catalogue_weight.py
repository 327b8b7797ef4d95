"""Tensors that stand for the whole weight of a sharded table, and for its products with hidden states.

Models compute logits over all items by ``hidden @ weight.T`` or ``F.linear(hidden, weight)``, and a loss of them. In a training
step neither tensor exists on any rank: the first one remembers the table, the second one the hidden states, until the loss is
computed over the shards. Without gradients every function gets a copy of the whole weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_freescale.losses import catalogue_cross_entropy

_TENSOR: Any = Tensor
_METADATA: set[Any] = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "grad_fn", "grad")
    ),
    *(getattr(Tensor, name).__get__ for name in dir(Tensor) if name.startswith("is_") and not callable(getattr(Tensor, name))),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.__hash__, Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, torch.numel),
}
"""Functions that ask for no number of the tensor."""
_PRODUCTS: set[Any] = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
_TRANSPOSED: set[Any] = {torch.t, Tensor.t, _TENSOR.T.__get__, _TENSOR.mT.__get__}
_SWAPS: set[Any] = {getattr(where, n) for where in (torch, Tensor) for n in ("transpose", "swapaxes", "swapdims")}
_PERMUTES: set[Any] = {torch.permute, Tensor.permute}
_SAME: set[Any] = {Tensor.contiguous, Tensor.float, torch.clone, Tensor.clone, torch.Tensor.to, Tensor.type_as}
_SCALES: set[Any] = {
    *(torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide),
    *(Tensor.mul, Tensor.multiply, Tensor.div, Tensor.divide, Tensor.true_divide),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__),
}
_SCALES_IN_PLACE: dict[Any, Any] = {
    Tensor.mul_: torch.mul,
    Tensor.__imul__: torch.mul,
    Tensor.div_: torch.div,
    Tensor.__itruediv__: torch.div,
}
_ADDS: set[Any] = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_OF_POSITIONS: set[Any] = {
    *(torch.flatten, Tensor.flatten, torch.unsqueeze, Tensor.unsqueeze, torch.squeeze, Tensor.squeeze),
    *(torch.index_select, Tensor.index_select),
}
_RESHAPES: set[Any] = {Tensor.view, Tensor.reshape, torch.reshape}
_LOG_SOFTMAX: set[Any] = {F.log_softmax, torch.log_softmax, Tensor.log_softmax}
_GATHERS: set[Any] = {torch.gather, Tensor.gather}


class _StandIn(Tensor):
    """A tensor that has a shape and no numbers."""

    path: str

    def refuse(self, what: str) -> NoReturn:
        """Raise because something is asked for that the shards do not give."""
        raise RuntimeError(
            f"{what} of {self.path}.weight, or of logits by it, with gradients: it is sharded, this rank has some of its rows "
            "only. In training_step hidden @ weight.T and F.linear(hidden, weight, bias) are computed over the shards where "
            "scaling, views and selected positions and then F.cross_entropy, or log_softmax with nll_loss or gather, follow. "
            f"Look up the rows of some items, as those of sampled negatives, by calling the embedding: {self.path}(ids). "
            "Otherwise call lightning_freescale.losses.catalogue_cross_entropy; read a copy of all rows by "
            f"trainer.strategy.full_weight({self.path!r}), on every rank; or leave {self.path!r} out of "
            "FreeScaleStrategy(shard=...)"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.path}.weight, size={list(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        flat = [*args, *(kwargs or {}).values()]
        # logits know more than weights of what may be done with them
        for kind in (CatalogueLogits, CatalogueWeight):
            found = next((each for each in flat if isinstance(each, kind)), None)
            if found is not None:
                return found.apply(func, *args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance's method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        next(each for each in args if isinstance(each, _StandIn)).refuse(f"{func}")


class CatalogueWeight(_StandIn):
    """The rows ``rows`` of a sharded table, of width ``dim``, as its weight or transposed.

    Args:
        leaf: this rank's part, which knows the table.
        path: of the embedding.
        rows: which rows.
        dim: width of a row.
        transposed: whether it is transposed.
    """

    @staticmethod
    def __new__(cls: Any, leaf: Tensor, path: str, rows: range, dim: int, transposed: bool = False) -> Any:
        """Make the tensor without numbers."""
        shape = (dim, len(rows)) if transposed else (len(rows), dim)
        options: Any = {"dtype": leaf.dtype, "device": leaf.device, "requires_grad": leaf.requires_grad}
        made = Tensor._make_wrapper_subclass(cls, shape, **options)
        made.leaf, made.path, made.rows, made.width, made.transposed = leaf, path, rows, dim, transposed
        return made

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.leaf: Any
        self.rows: range
        self.width: int
        self.transposed: bool

    def freescale_catalogue(self) -> Any:
        """Return these rows for a loss, see :data:`lightning_freescale.losses.catalogue_rows.ATTRIBUTE`."""
        if self.transposed:
            self.refuse("the transpose")
        found = self.leaf.freescale_catalogue()
        start, stop = self.rows.start, self.rows.stop
        return found[start:stop] if isinstance(found, Tensor) else found.limited(start, stop)

    def freescale_ranks(self, hidden: Tensor, targets: Tensor, seen: Tensor | None) -> Tensor | None:
        """Return the ranks of targets among these rows, see :func:`lightning_freescale.metrics.catalogue_ranks`."""
        start = self.rows.start
        seen = None if seen is None else torch.where(seen >= 0, seen + start, -1)
        find = getattr(self.leaf, "freescale_ranks", None)
        found: Tensor | None = None if find is None else find(hidden, targets + start, seen, self.rows)
        return found

    def whole(self) -> Tensor:
        """Return a copy of these rows. Collective."""
        found: Tensor = self._like(transposed=False).freescale_catalogue()
        return found.T if self.transposed else found

    def apply(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what ``func`` would return of the whole weight."""
        if not torch.is_grad_enabled():
            args, kwargs = tree_map_only(CatalogueWeight, CatalogueWeight.whole, (args, kwargs))
            return func(*args, **kwargs)
        if args[0] is self:
            if func in _TRANSPOSED or (func in _SWAPS | _PERMUTES and _dims(args, kwargs, 2) in ([0, 1], [1, 0])):
                keeps = func in _PERMUTES and _dims(args, kwargs, 2) == [0, 1]
                return self if keeps else self._like(transposed=not self.transposed)
            if func in _SAME and _keeps_type(self, args[1:], kwargs):
                return self
            if func is Tensor.__getitem__ and not self.transposed:
                first, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
                rows = self._range(first)
                if rows is not None and all(each in (slice(None), ...) for each in rest):
                    return self._like(rows=rows)
        elif func in _PRODUCTS and args[1] is self and self.transposed:
            return CatalogueLogits(args[0], self._like(transposed=False))
        elif func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args)) | kwargs
            if given["weight"] is self and not self.transposed:
                return CatalogueLogits(given["input"], self, given.get("bias"))
        return self.refuse(getattr(func, "__name__", f"{func}"))

    def _range(self, index: Any) -> range | None:
        """Return which rows an index selects, if these follow each other; it may be a mask that leaves rows at an end out."""
        if isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == (len(self.rows),):
            chosen = index.nonzero()
            if len(chosen) and int(chosen[-1] - chosen[0]) == len(chosen) - 1:
                index = slice(int(chosen[0]), int(chosen[-1]) + 1)
        return self.rows[index] if isinstance(index, slice) and index.step in (None, 1) else None

    def _like(self, rows: range | None = None, transposed: bool | None = None) -> CatalogueWeight:
        transposed = self.transposed if transposed is None else transposed
        return CatalogueWeight(self.leaf, self.path, self.rows if rows is None else rows, self.width, transposed)


class CatalogueLogits(_StandIn):
    """``hidden @ weight.T + bias``, not computed.

    Args:
        hidden: shape ``[..., dim]``.
        weight: not transposed.
        bias: shape ``[items]``.
        at: which dimension is that of the items; the last one by default.
        of_log: whether these are the logarithms of probabilities, after ``log_softmax``.
    """

    @staticmethod
    def __new__(
        cls: Any,
        hidden: Tensor,
        weight: CatalogueWeight,
        bias: Tensor | None = None,
        at: int | None = None,
        of_log: bool = False,
    ) -> Any:
        """Make the tensor without numbers."""
        shape = list(hidden.shape[:-1])
        at = len(shape) if at is None else at
        shape.insert(at, len(weight.rows))
        options: Any = {"dtype": weight.dtype, "device": hidden.device}
        made = Tensor._make_wrapper_subclass(cls, shape, **options, requires_grad=hidden.requires_grad or weight.requires_grad)
        made.hidden, made.weight, made.bias, made.at, made.of_log, made.path = hidden, weight, bias, at, of_log, weight.path
        return made

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.hidden: Tensor
        self.weight: CatalogueWeight
        self.bias: Tensor | None
        self.at: int
        self.of_log: bool
        self.detached = False

    def apply(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what ``func`` would return of the logits."""
        found = None if self.detached else self._apply(func, *args, **kwargs)
        if found is None:
            self.refuse(getattr(func, "__name__", f"{func}"))
        return found

    def _apply(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        last, ours = self.at == self.dim() - 1, args[0] is self
        if func in (F.cross_entropy, F.nll_loss):
            return self._loss(func, *args, **kwargs)
        if func in (torch.detach, Tensor.detach):
            found = self._like(self.hidden.detach())
            found.detached = True
            return found
        if func in _SAME and ours and _keeps_type(self, args[1:], kwargs):
            return self
        if func in _LOG_SOFTMAX and ours:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return self._like(of_log=True) if dim is not None and dim % self.dim() == self.at else None
        if func in _SWAPS | _PERMUTES and ours:
            return self._permuted(_dims(args, kwargs, self.dim()), func in _PERMUTES)
        if not last:
            return None
        if func is Tensor.__getitem__:
            return self._selected(args[1])
        if func in _RESHAPES:
            return self._reshaped(*args[1:], **kwargs)
        if func in _OF_POSITIONS:
            hidden = func(self.hidden, *args[1:], **kwargs)
            return self._like(hidden) if hidden.shape[-1] == self.hidden.shape[-1] else None
        if self.of_log:
            return self._gathered(*args, **kwargs) if func in _GATHERS and ours else None
        if func in _SCALES and not kwargs:
            return self._scaled(func, args)
        if func in _SCALES_IN_PLACE:
            scaled = self._scaled(_SCALES_IN_PLACE[func], args)
            if scaled is not None:
                self.hidden, self.bias = scaled.hidden, scaled.bias
            return None if scaled is None else self
        if func in _ADDS and not kwargs:
            other = args[1] if ours else args[0]
            if isinstance(other, Tensor) and other.numel() == other.shape[-1:].numel() == len(self.weight.rows):
                other = other.reshape(-1)
                return self._like(bias=other if self.bias is None else self.bias + other)
        return None

    def _like(self, hidden: Tensor | None = None, **changes: Any) -> CatalogueLogits:
        hidden = self.hidden if hidden is None else hidden
        kept: dict[str, Any] = {"weight": self.weight, "bias": self.bias, "of_log": self.of_log}
        if self.at != self.dim() - 1:
            kept["at"] = self.at
        return CatalogueLogits(hidden, **{**kept, **changes})

    def _loss(self, func: Any, input: Tensor, target: Tensor, *others: Any, **options: Any) -> Tensor | None:
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = dict(zip(names, others)) | options
        for name in ("weight", "size_average", "reduce"):
            if given.pop(name, None) is not None:
                self.refuse(f"{func.__name__}({name}=...)")
        if input is not self or target.is_floating_point() or self.at != min(1, self.dim() - 1):
            return None
        if func is F.nll_loss and not self.of_log:
            return None
        return catalogue_cross_entropy(self.hidden, self.weight, target, self.bias, **given)

    def _gathered(self, _: Tensor, dim: int, index: Tensor, **options: Any) -> Tensor | None:
        if dim % self.dim() != self.at or index.shape != (*self.hidden.shape[:-1], 1):
            return None
        nothing_ignored = -1
        found = catalogue_cross_entropy(
            self.hidden, self.weight, index[..., 0], self.bias, ignore_index=nothing_ignored, reduction="none"
        )
        return -found[..., None]

    def _permuted(self, dims: list[int], whole: bool) -> CatalogueLogits | None:
        order = list(range(self.dim()))
        if whole:
            order = dims
        else:
            order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
        positions = [each - (each > self.at) for each in order if each != self.at]
        hidden = self.hidden.permute(*positions, self.hidden.dim() - 1)
        return CatalogueLogits(hidden, self.weight, self.bias, order.index(self.at), self.of_log)

    def _selected(self, index: Any) -> CatalogueLogits | None:
        given = list(index) if isinstance(index, tuple) else [index]
        taken = sum(each.dim() if isinstance(each, Tensor) and each.dtype == torch.bool else each is not None for each in given)
        ellipsis = [place for place, each in enumerate(given) if each is ...]
        taken -= len(ellipsis)
        if taken < self.dim():
            if ellipsis and ellipsis[0] < len(given) - 1 and taken:
                return self._limited(given[:-1], given[-1])
            return self._like(self.hidden[index])
        return self._limited(given[:-1], given[-1])

    def _limited(self, positions: list[Any], items: Any) -> CatalogueLogits | None:
        """Return the logits of some positions, and of a range of items."""
        if not isinstance(items, slice) or items.step not in (None, 1):
            return None
        hidden = self.hidden[(*positions, slice(None))]
        bias = None if self.bias is None else self.bias[items]
        if self.of_log:  # their probabilities are of all items
            return None
        return CatalogueLogits(hidden, self.weight[items], bias)

    def _reshaped(self, *shape: Any, **options: Any) -> CatalogueLogits | None:
        sizes = options.get("shape", shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if not all(isinstance(size, int) for size in sizes):
            return None
        items, lead = len(self.weight.rows), list(sizes[:-1])
        positions = self.hidden.shape[:-1].numel()
        if sizes[-1] == -1 and torch.Size(lead).numel() != positions:
            return None
        return self._like(self.hidden.reshape(*lead, self.hidden.shape[-1])) if sizes[-1] in (items, -1) else None

    def _scaled(self, func: Callable[..., Tensor], args: Any) -> CatalogueLogits | None:
        factor = args[1] if args[0] is self else args[0]
        by_position = isinstance(factor, Tensor) and factor.dim() > 0
        if by_position and (factor.shape[-1] != 1 or self.bias is not None):
            return None
        if args[0] is not self and func not in (torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__):
            return None

        def scale(given: Tensor) -> Tensor:
            return func(given, factor)

        return self._like(scale(self.hidden), bias=None if self.bias is None else scale(self.bias))


def _dims(args: Any, kwargs: Any, dims: int) -> list[int]:
    """Return the dimensions that a transposing function is given, from 0 to ``dims - 1``."""
    given = [*args[1:], *kwargs.values()]
    if len(given) == 1 and not isinstance(given[0], int):
        given = list(given[0])
    return [each % dims for each in given]


def _keeps_type(tensor: Tensor, args: Any, kwargs: Any) -> bool:
    """Whether a conversion is to the dtype that the tensor has."""
    given = [*args, *kwargs.values()]
    types = [each.dtype if isinstance(each, Tensor) else each for each in given]
    return all(each == tensor.dtype for each in types if isinstance(each, torch.dtype))
