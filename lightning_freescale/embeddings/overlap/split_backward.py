"""A backward that computes the gradients of dense weights last, after the gradients of the rows that other ranks wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from lightning_freescale._runtime.attributes import replaced

_Place: TypeAlias = tuple[int, tuple[int, ...], bool, int | None]
"""The identity of the weight, its shape, whether it is transposed, and the identity of the bias."""

_LAST_LATE = 4095
"""The highest sequence number of late operations; other operations have higher ones."""


class WindowGradients:
    """The inputs of weight gradients of a window's micro-batches, kept until its last backward.

    Each batch but the last runs in a :class:`WeightGradientsLast` with ``last=False``. All batches must use the same layers,
    and each backward runs in :meth:`backward`. Gradients requested outside of it are those of their batch only.
    """

    def __init__(self) -> None:
        self.kept: dict[_Place, list[tuple[Tensor, Tensor]]] = {}  # inputs of layers and gradients of their outputs
        self.in_backward = False

    def backward(self) -> AbstractContextManager[None]:
        """Return the context of the backward of one batch."""
        return replaced(self, {"in_backward": True})

    def close(self) -> None:
        """End a window. Raise a RuntimeError if its last batch did not use some layers, whose gradients would be lost."""
        lost, self.kept = self.kept, {}
        if lost:
            shapes = [place[1] for place in lost]
            raise RuntimeError(
                "split_backward=True: the last micro-batch does not use layers that earlier ones use, with weights of shapes "
                f"{shapes}. Leave out split_backward, or pass find_unused_parameters=True."
            )


class WeightGradientsLast(TorchFunctionMode):
    """Records linear layers in a forward, so that backward computes the gradients of their weights last.

    The backward of a layer is two products: the gradient of its input, for which the layer before waits, and the gradient of
    its weight, for which no rank waits. Backward computes the first for all layers and so reaches the embedding rows. It
    computes the others while the gradients of these rows are exchanged. Zero-bubble pipelines use this split (Qi et al., arXiv
    2401.10241); here it is within one backward. Every gradient is bitwise unchanged. The inputs of layers and the gradients of
    their outputs are held until the end. ::

        with WeightGradientsLast():
            loss = model(batch)
        loss.backward()

    It handles ``linear``, ``matmul``, ``mm`` and ``addmm`` of an activation and a parameter, and ``nn.MultiheadAttention``.
    Everything else is unchanged, as are compiled modules, activation checkpointing and forwards without gradients. A second
    derivative through such a layer raises an error. Under autocast, the gradients of a parameter that is used several times are
    summed in float32 instead of autocast's type.

    Args:
        window: the window of several batches with one optimizer step. The backward of the last batch then computes the
            gradients of all its weights, which costs the memory of a whole batch. Until then they have no ``.grad``. Slices of
            parameters and parameters with hooks get their gradients in each backward. Sums may run in another order.
        last: whether this batch is the last of its window.

    Raises:
        ValueError: ``last`` is False without a window.
    """

    def __init__(self, window: WindowGradients | None = None, last: bool = True) -> None:
        super().__init__()
        if window is None and not last:
            raise ValueError("WeightGradientsLast(last=False) requires a window. Pass window=.")
        self._window, self._last = window, last

    def __enter__(self) -> WeightGradientsLast:
        _keep_low_numbers_free()
        self._layers = 0
        entered: WeightGradientsLast = super().__enter__()
        return entered

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in self._OPERANDS:
            return self._call(func, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            # a mode does not see the functions that torch's own functions call
            with replaced(F, {"linear": partial(self._call, F.linear)}):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    # returns input, weight, bias, and whether the weight is transposed; None for other calls
    _OPERANDS: ClassVar[dict[Any, Callable[..., Any]]] = {
        F.linear: lambda input, weight, bias=None: (input, weight, bias, True),
        torch.mm: lambda input, mat2=None, *more, **others: None if more or others else (input, mat2, None, False),
        torch.addmm: lambda bias, mat1=None, mat2=None, *more, **others: None if more or others else (mat1, mat2, bias, False),
        torch.matmul: lambda input, other=None, **others: None if others else (input, other, None, False),
        torch.Tensor.mm: lambda input, mat2=None, *more, **others: None if more or others else (input, mat2, None, False),
        torch.Tensor.matmul: lambda input, other=None: (input, other, None, False),
        torch.Tensor.__matmul__: lambda input, other=None: (input, other, None, False),
    }

    def _call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        operands = self._OPERANDS[func](*args, **kwargs)
        if operands is None or not _can_be_split(*operands) or (self._window is not None and not _can_wait(*operands)):
            return func(*args, **kwargs)
        self._layers += 1
        return _split(min(self._layers, _LAST_LATE), self._window, self._last, *operands)


def after_the_others(result: Tensor, number: int) -> Tensor:
    """Make backward run the operation of ``result`` after all ready operations that are not late.

    Backward runs the late operation with the highest ``number`` first, like the last one of forward. So the gradients of a
    parameter that is used several times are summed in the usual order.
    """
    node: Any = result.grad_fn
    node._set_sequence_nr(number)
    return result


def _keep_low_numbers_free() -> None:
    """Advance this thread's sequence numbers beyond those of late operations; its first forwards would start at 0."""
    value = torch.zeros((), requires_grad=True)
    while True:
        made = value.view(()).grad_fn
        assert made is not None
        if made._sequence_nr() > _LAST_LATE:
            return


def _can_be_split(input: Any, weight: Any, bias: Any, transposed: bool) -> bool:
    return (
        _of_a_parameter(weight)
        and weight.requires_grad
        and weight.dim() == 2
        and weight.numel() > 0
        and type(input) in (Tensor, nn.Parameter)
        and input.requires_grad  # otherwise backward ends here
        and (1 < input.dim() < 4 or (input.dim() >= 4 and input.is_contiguous()))  # torch sums others in another order
        and all(each.is_floating_point() and each.layout == torch.strided for each in (input, weight))
        and input.shape[-1] == weight.shape[transposed]
        and (bias is None or (_of_a_parameter(bias) and bias.shape == weight.shape[not transposed :][:1]))
        and _of_one_type(input, weight, *() if bias is None else (bias,))
        # activation checkpointing counts saved tensors, and recomputes outside of the context
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _can_wait(input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> bool:
    """Return whether gradients may be computed once per window: for whole parameters without hooks."""
    operands = [weight] if bias is None else [weight, bias]
    return all(type(each) is nn.Parameter and not each._backward_hooks for each in operands)


def _of_a_parameter(tensor: Any) -> bool:
    """Return whether a tensor is a parameter or a part of one; then no row waits for its gradient."""
    return type(tensor._base if type(tensor) is Tensor and tensor._is_view() else tensor) is nn.Parameter


def _of_one_type(*operands: Tensor) -> bool:
    types = {operand.dtype for operand in operands}
    if torch.is_autocast_enabled(operands[0].device.type):
        return torch.float64 not in types  # autocast leaves it unchanged
    return len(types) == 1


def _split(
    number: int,
    window: WindowGradients | None,
    last: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool,
) -> Tensor:
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    values, matrix = input.to(dtype), weight.t() if transposed else weight
    fixed, fixed_bias = matrix.detach(), None if bias is None else bias.detach()
    place = id(weight), tuple(weight.shape), transposed, None if bias is None else id(bias)
    # the values are detached, or the layer before would wait. Before the last batch of a window, the weight is not an input:
    # its hooks would run without a gradient
    if last:
        late = _WeightGradient.apply(values.detach(), matrix, bias, window, place)
    else:
        late = _KeptForLater.apply(values.detach(), matrix.shape[1], window, place, values.new_empty(0, requires_grad=True))
    after_the_others(late, number)
    return _Product.apply(values, late, fixed.to(dtype), None if fixed_bias is None else fixed_bias.to(dtype))


class _Product(torch.autograd.Function):
    # backward returns the gradient of the input, and passes that of the output to the late operation

    @staticmethod
    def forward(ctx: Any, values: Tensor, late: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        flat = values.reshape(-1, len(matrix))
        ctx.save_for_backward(matrix)
        ctx.by_columns = _lies_by_columns(flat)
        product = torch.mm(flat, matrix) if bias is None else torch.addmm(bias, flat, matrix)
        return torch.ops.aten._unsafe_view(product, late.shape)  # not a view for autograd, so it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (matrix,) = ctx.saved_tensors
        flat = gradient.reshape(-1, matrix.shape[1])
        of_values = matrix.mm(flat.t()).t() if ctx.by_columns else flat.mm(matrix.t())
        return of_values.reshape(*gradient.shape[:-1], len(matrix)), gradient, None, None


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, matrix: Tensor, bias: Tensor | None, window: WindowGradients | None, place: _Place
    ) -> Tensor:
        ctx.save_for_backward(values)
        ctx.dtype, ctx.by_columns = matrix.dtype, _lies_by_columns(matrix)
        ctx.window, ctx.place = window, place
        # contains nothing: it receives the gradient
        return values.new_empty(1).expand(*values.shape[:-1], matrix.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (values,) = ctx.saved_tensors
        kept = [] if ctx.window is None or not ctx.window.in_backward else ctx.window.kept.pop(ctx.place, [])
        parts = [*kept, (values, gradient)]
        flat = [(into.reshape(-1, into.shape[-1]), each.reshape(-1, each.shape[-1])) for into, each in parts]
        _, of_matrix, of_bias, *_ = ctx.needs_input_grad
        given: list[Tensor | None] = [None, None]
        if of_matrix:
            products = (each.t().mm(into).t() if ctx.by_columns else into.t().mm(each) for into, each in flat)
            given[0] = _sum(product.to(ctx.dtype) for product in products)
        if of_bias:
            given[1] = _sum(each.sum(0).to(ctx.dtype) for _, each in flat)
        return None, *given, None, None


class _KeptForLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, outputs: int, window: WindowGradients, place: _Place, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        ctx.window, ctx.place = window, place
        return values.new_empty(1).expand(*values.shape[:-1], outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        if ctx.window.in_backward:
            ctx.window.kept.setdefault(ctx.place, []).append((*ctx.saved_tensors, gradient))
        return (None,) * 5


def _sum(gradients: Iterator[Tensor]) -> Tensor:
    """Return the sum in the order in which ``.grad`` accumulates."""
    total = next(gradients)
    for gradient in gradients:
        total += gradient
    return total


def _lies_by_columns(matrix: Tensor) -> bool:
    """Return whether torch computes the gradient of ``matrix`` by columns, so that every sum runs in that order."""
    return matrix.stride() == (1, len(matrix))
