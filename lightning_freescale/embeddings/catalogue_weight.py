"""Placeholders for the whole weight of a sharded table and for its products with hidden states.

Models compute logits over all items by ``hidden @ weight.T`` or ``F.linear(hidden, weight)``, and a loss of the logits. In a
training step neither tensor exists on any rank: :class:`CatalogueWeight` refers to the table, :class:`CatalogueLogits` keeps
the hidden states, and the loss is computed over the shards. Without gradients functions get a copy of the whole weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_freescale.losses import catalogue_cross_entropy

_METADATA: set[Any] = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "grad_fn", "grad")
    ),
    *(getattr(Tensor, name).__get__ for name in dir(Tensor) if name.startswith("is_") and not callable(getattr(Tensor, name))),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.__hash__, Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, torch.numel),
}
"""The functions that do not read values of the tensor."""
_PRODUCTS: set[Any] = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
_TRANSPOSED: set[Any] = {torch.t, Tensor.t, *(getattr(Tensor, name).__get__ for name in ("T", "mT"))}
_SWAPS: set[Any] = {getattr(where, n) for where in (torch, Tensor) for n in ("transpose", "swapaxes", "swapdims")}
_PERMUTES: set[Any] = {torch.permute, Tensor.permute}
_SAME: set[Any] = {Tensor.contiguous, Tensor.float, Tensor.to, Tensor.type_as}
_PRODUCTS_BY_NUMBER: set[Any] = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__}
_QUOTIENTS: set[Any] = {
    *(torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.__truediv__),
}
_SCALES_IN_PLACE: dict[Any, Any] = {
    Tensor.mul_: torch.mul,
    Tensor.__imul__: torch.mul,
    Tensor.div_: torch.div,
    Tensor.__itruediv__: torch.div,
}


class _Placeholder(Tensor):
    """A tensor with a shape and no values."""

    path: str

    def refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} of {self.path}.weight, or of logits computed from it, is not supported in training, because each rank has "
            f"some of the rows. Call {self.path}(ids) for the rows of some items. For all items, use hidden @ weight.T with "
            "F.cross_entropy, or lightning_freescale.losses.catalogue_cross_entropy. Otherwise read a copy with "
            f"trainer.strategy.full_weight({self.path!r}) on every rank, or remove {self.path!r} from shard=."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.path}.weight, size={list(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [] if func in _METADATA else tree_leaves((args, kwargs))
        for kind in (CatalogueLogits, CatalogueWeight):  # logits support more functions than weights
            found = next((each for each in flat if isinstance(each, kind)), None)
            if found is not None:
                return found.apply(func, *args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance's method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        next(each for each in tree_leaves((args, kwargs)) if isinstance(each, _Placeholder)).refuse(f"{func}")


class CatalogueWeight(_Placeholder):
    """A placeholder for rows of a sharded table, or for their transpose."""

    leaf: Any  # this rank's part of the weight, with the functions freescale_catalogue and freescale_ranks
    rows: range  # rows of the table
    width: int  # width of a row
    transposed: bool

    @staticmethod
    def __new__(cls: Any, leaf: Tensor, path: str, rows: range, dim: int, transposed: bool = False) -> Any:
        """Return a tensor without values."""
        shape = (dim, len(rows)) if transposed else (len(rows), dim)
        options: Any = {"dtype": leaf.dtype, "device": leaf.device, "requires_grad": leaf.requires_grad}
        made = Tensor._make_wrapper_subclass(cls, shape, **options)
        made.leaf, made.path, made.rows, made.width, made.transposed = leaf, path, rows, dim, transposed
        return made

    def freescale_catalogue(self) -> Any:
        """Return these rows for a loss, see :class:`lightning_freescale.losses.CatalogueRows`."""
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
        """Return the result of ``func`` for the whole weight, or raise."""
        if args[0] is self:
            order = _order(func, args, kwargs, 2) if func in _TRANSPOSED | _SWAPS | _PERMUTES else None
            if order in ([0, 1], [1, 0]):
                return self if order == [0, 1] else self._like(transposed=not self.transposed)
            # products with a weight of 16 bits are promoted, but a copy of the whole weight has to be converted
            converts = func is Tensor.float and self.dtype != torch.float32 and not torch.is_grad_enabled()
            if func in _SAME and not converts and _keeps_type(self, args[1:], kwargs):
                return self
            if func is Tensor.__getitem__ and not self.transposed:
                first, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
                rows = self._range(first)
                if rows is not None and all(each in (slice(None), ...) for each in rest):
                    return self._like(rows=rows)
        if not torch.is_grad_enabled():
            args, kwargs = tree_map_only(CatalogueWeight, CatalogueWeight.whole, (args, kwargs))
            return func(*args, **kwargs)
        if func in _PRODUCTS and args[1] is self and self.transposed:
            return CatalogueLogits(args[0], self._like(transposed=False))
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args)) | kwargs
            if given["weight"] is self and not self.transposed:
                return CatalogueLogits(given["input"], self, given.get("bias"))
        return self.refuse(getattr(func, "__name__", f"{func}"))

    def _range(self, index: Any) -> range | None:
        # accept a slice, or a mask of consecutive rows, such as one that excludes a padding row
        if isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == (len(self.rows),):
            chosen = index.nonzero()
            if len(chosen) and int(chosen[-1] - chosen[0]) == len(chosen) - 1:
                index = slice(int(chosen[0]), int(chosen[-1]) + 1)
        return self.rows[index] if isinstance(index, slice) and index.step in (None, 1) else None

    def _like(self, rows: range | None = None, transposed: bool | None = None) -> CatalogueWeight:
        transposed = self.transposed if transposed is None else transposed
        return CatalogueWeight(self.leaf, self.path, self.rows if rows is None else rows, self.width, transposed)


class CatalogueLogits(_Placeholder):
    """A placeholder for ``hidden @ weight.T + bias``."""

    hidden: Tensor  # shape [..., dim]
    weight: Any  # a CatalogueWeight; torch declares that its rows are a Tensor
    bias: Tensor | None  # shape [items]
    at: int  # dimension of the items
    of_log: bool  # whether the values are log-probabilities, after log_softmax
    detached: bool

    @staticmethod
    def __new__(
        cls: Any,
        hidden: Tensor,
        weight: CatalogueWeight,
        bias: Tensor | None = None,
        at: int | None = None,
        of_log: bool = False,
    ) -> Any:
        """Return a tensor without values."""
        shape = list(hidden.shape[:-1])
        at = len(shape) if at is None else at
        shape.insert(at, len(weight.rows))
        options: Any = {"dtype": weight.dtype, "device": hidden.device}
        made = Tensor._make_wrapper_subclass(cls, shape, **options, requires_grad=hidden.requires_grad or weight.requires_grad)
        made.hidden, made.weight, made.bias, made.at, made.of_log, made.path = hidden, weight, bias, at, of_log, weight.path
        made.detached = False
        return made

    def apply(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``func`` for the logits, or raise."""
        handler = None if self.detached else _HANDLERS.get(func)
        found = None if handler is None else handler(self, func, args, kwargs)
        return self.refuse(getattr(func, "__name__", f"{func}")) if found is None else found

    @property
    def last(self) -> bool:
        """Whether the items are the last dimension."""
        return self.at == self.dim() - 1

    def _like(self, hidden: Tensor | None = None, **changes: Any) -> CatalogueLogits:
        hidden = self.hidden if hidden is None else hidden
        kept: dict[str, Any] = {"weight": self.weight, "bias": self.bias, "of_log": self.of_log}
        if not self.last:
            kept["at"] = self.at
        return CatalogueLogits(hidden, **{**kept, **changes})

    # -- results of functions; None for arguments that the shards do not support

    def _same(self, func: Any, args: Any, kwargs: Any) -> CatalogueLogits | None:
        return self if args[0] is self and _keeps_type(self, args[1:], kwargs) else None

    def _cloned(self, func: Any, args: Any, kwargs: Any) -> CatalogueLogits:
        return self._like()

    def _as_detached(self, func: Any, args: Any, kwargs: Any) -> CatalogueLogits:
        found = self._like(self.hidden.detach())
        found.detached = True
        return found

    def _loss(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = dict(zip(names, args)) | kwargs
        target = given.pop("target")
        for name in ("weight", "size_average", "reduce"):
            if given.pop(name, None) is not None:
                self.refuse(f"{func.__name__}({name}=...)")
        if given.pop("input") is not self or target.is_floating_point() or self.at != min(1, self.dim() - 1):
            return None
        if func is F.nll_loss and not self.of_log:
            return None
        return catalogue_cross_entropy(self.hidden, self.weight, target, self.bias, **given)

    def _log_softmax(self, func: Any, args: Any, kwargs: Any) -> CatalogueLogits | None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return self._like(of_log=True) if dim is not None and dim % self.dim() == self.at else None

    def _gathered(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        given = dict(zip(("input", "dim", "index"), args)) | kwargs
        index = given["index"]
        fits = given["dim"] % self.dim() == self.at and index.shape == (*self.hidden.shape[:-1], 1)
        if not (self.of_log and self.last and fits):
            return None
        options: Any = {"ignore_index": torch.iinfo(torch.int64).min, "reduction": "none"}  # ignores no position
        return -catalogue_cross_entropy(self.hidden, self.weight, index[..., 0], self.bias, **options)[..., None]

    def _permuted(self, func: Any, args: Any, kwargs: Any) -> CatalogueLogits:
        order = _order(func, args, kwargs, self.dim())
        positions = [each - (each > self.at) for each in order if each != self.at]
        hidden = self.hidden.permute(*positions, self.hidden.dim() - 1)
        return CatalogueLogits(hidden, self.weight, self.bias, order.index(self.at), self.of_log)

    def _of_positions(self, func: Any, args: Any, kwargs: Any) -> CatalogueLogits | None:
        hidden = func(self.hidden, *args[1:], **kwargs)
        return self._like(hidden) if self.last and hidden.shape[-1] == self.hidden.shape[-1] else None

    def _selected(self, func: Any, args: Any, kwargs: Any) -> CatalogueLogits | None:
        given = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
        dims = [each.dim() if isinstance(each, Tensor) and each.dtype == torch.bool else each is not None for each in given]
        places = [place for place, each in enumerate(given) if each is ...]
        *positions, items = given
        if sum(dims) - len(places) < self.dim() and (not places or places[0] == len(given) - 1 or items is None):
            return self._of_positions(func, args, kwargs)
        if not self.last or self.of_log or not isinstance(items, slice) or items.step not in (None, 1):
            # probabilities are normalized over all items, so a selection of items would change them
            return self._of_positions(func, args, kwargs) if items == slice(None) else None
        bias = None if self.bias is None else self.bias[items]
        return CatalogueLogits(self.hidden[(*positions, slice(None))], self.weight[items], bias)

    def _reshaped(self, func: Any, args: Any, kwargs: Any) -> CatalogueLogits | None:
        shape = args[1:]
        sizes = kwargs.get("shape", shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if not self.last or not all(isinstance(size, int) for size in sizes):
            return None
        items, lead = len(self.weight.rows), list(sizes[:-1])
        if sizes[-1] == -1 and torch.Size(lead).numel() != self.hidden.shape[:-1].numel():
            return None
        return self._like(self.hidden.reshape(*lead, self.hidden.shape[-1])) if sizes[-1] in (items, -1) else None

    def _scaled(self, func: Callable[..., Tensor], args: Any, kwargs: Any) -> CatalogueLogits | None:
        factor = args[1] if args[0] is self else args[0]
        by_position = isinstance(factor, Tensor) and factor.dim() > 0
        refused = by_position and (factor.shape[-1] != 1 or self.bias is not None)
        if refused or kwargs or self.of_log or not self.last or (args[0] is not self and func not in _PRODUCTS_BY_NUMBER):
            return None
        return self._like(func(self.hidden, factor), bias=None if self.bias is None else func(self.bias, factor))

    def _scaled_in_place(self, func: Any, args: Any, kwargs: Any) -> CatalogueLogits | None:
        scaled = self._scaled(_SCALES_IN_PLACE[func], args, kwargs)
        if scaled is not None:
            self.hidden, self.bias = scaled.hidden, scaled.bias
        return None if scaled is None else self

    def _added(self, func: Any, args: Any, kwargs: Any) -> CatalogueLogits | None:
        other = args[1] if args[0] is self else args[0]
        by_item = isinstance(other, Tensor) and other.numel() == other.shape[-1:].numel() == len(self.weight.rows)
        if not by_item or kwargs or self.of_log or not self.last:
            return None
        other = other.reshape(-1)
        return self._like(bias=other if self.bias is None else self.bias + other)


_HANDLERS: dict[Any, Callable[[CatalogueLogits, Any, Any, Any], Any]] = {
    **dict.fromkeys(_SAME, CatalogueLogits._same),
    **dict.fromkeys((torch.clone, Tensor.clone), CatalogueLogits._cloned),
    **dict.fromkeys((torch.detach, Tensor.detach), CatalogueLogits._as_detached),
    **dict.fromkeys((F.cross_entropy, F.nll_loss), CatalogueLogits._loss),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), CatalogueLogits._log_softmax),
    **dict.fromkeys((torch.gather, Tensor.gather), CatalogueLogits._gathered),
    **dict.fromkeys(_SWAPS | _PERMUTES, CatalogueLogits._permuted),
    **dict.fromkeys((torch.flatten, Tensor.flatten, torch.index_select, Tensor.index_select), CatalogueLogits._of_positions),
    **dict.fromkeys((torch.unsqueeze, Tensor.unsqueeze, torch.squeeze, Tensor.squeeze), CatalogueLogits._of_positions),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), CatalogueLogits._reshaped),
    **dict.fromkeys((*_PRODUCTS_BY_NUMBER, *_QUOTIENTS), CatalogueLogits._scaled),
    **dict.fromkeys(_SCALES_IN_PLACE, CatalogueLogits._scaled_in_place),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), CatalogueLogits._added),
    Tensor.__getitem__: CatalogueLogits._selected,
}
"""The method of the logits that replaces each function."""


def _order(func: Any, args: Any, kwargs: Any, dims: int) -> list[int]:
    """Return the order in which a function that transposes or permutes returns the dimensions."""
    given = [*args[1:], *kwargs.values()]
    if len(given) == 1 and not isinstance(given[0], int):
        given = list(given[0])
    given = [each % dims for each in given]
    if func in _PERMUTES:
        return given
    order, (one, other) = list(range(dims)), given or (0, 1)
    order[one], order[other] = order[other], order[one]
    return order


def _keeps_type(tensor: Tensor, args: Any, kwargs: Any) -> bool:
    given = [*args, *kwargs.values()]
    types = [each.dtype if isinstance(each, Tensor) else each for each in given]
    return all(each == tensor.dtype for each in types if isinstance(each, torch.dtype))
