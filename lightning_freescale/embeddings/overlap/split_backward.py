"""Backward with the gradients of the dense weights last: what other ranks wait for, the gradients of the rows, comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

_LAST_LATE = 4095
"""Numbers up to this one are kept free of operations that are not late."""


class WeightGradientsLast(TorchFunctionMode):
    """In a forward within it, linear layers are recorded so that backward leaves the gradients of their weights for the end.

    A layer's backward is two products: the gradient of its input, which the layer before waits for, and that of its weight,
    for which nobody waits. Backward does the first of all layers, comes so to the embedding rows, and does the others while
    these rows' gradients travel (the split that zero-bubble pipelines make, Qi et al., arXiv 2401.10241, within one
    backward). Every number is bitwise what it is otherwise. The gradients of the layers' outputs are held until the end. ::

        with WeightGradientsLast():
            loss = model(batch)
        loss.backward()

    It knows ``linear``, ``matmul``, ``mm`` and ``addmm`` of an activation and a parameter, and ``nn.MultiheadAttention``. All
    else is as ever, as are compiled modules, activation checkpointing and forwards without gradients. A second derivative
    through such a layer is an error. Under autocast the gradients of a parameter that is used several times are added up in
    float32, and not in autocast's type.
    """

    def __enter__(self) -> WeightGradientsLast:
        """Begin a forward."""
        _keep_low_numbers_free()
        self._layers = 0
        entered: WeightGradientsLast = super().__enter__()
        return entered

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``, or what stands in for it."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in self._OPERANDS:
            return self._call(func, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self._linear_by_name():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    # input, weight, bias, and whether the weight is transposed; None if it is called otherwise
    _OPERANDS: ClassVar[dict[Any, Callable[..., Any]]] = {
        F.linear: lambda input, weight, bias=None: (input, weight, bias, True),
        torch.mm: lambda input, mat2=None, **others: None if others else (input, mat2, None, False),
        torch.addmm: lambda bias, mat1=None, mat2=None, **others: None if others else (mat1, mat2, bias, False),
        torch.matmul: lambda input, other=None, **others: None if others else (input, other, None, False),
        torch.Tensor.mm: lambda input, mat2=None: (input, mat2, None, False),
        torch.Tensor.matmul: lambda input, other=None: (input, other, None, False),
        torch.Tensor.__matmul__: lambda input, other=None: (input, other, None, False),
    }

    def _call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        operands = self._OPERANDS[func](*args, **kwargs)
        if operands is None or not _can_be_split(*operands):
            return func(*args, **kwargs)
        self._layers += 1
        return _split(min(self._layers, _LAST_LATE), *operands)

    @contextmanager
    def _linear_by_name(self) -> Iterator[None]:
        # while torch runs one of its own functions, it shows a mode nothing of what that calls
        linear = F.linear
        F.linear = lambda *args, **kwargs: self._call(linear, *args, **kwargs)
        try:
            yield
        finally:
            F.linear = linear


def after_the_others(result: Tensor, number: int) -> Tensor:
    """Have backward do the operation that ``result`` comes from after all that is ready and not late.

    Of what is late, backward does the highest ``number`` first, as it does the last of forward first: so the gradients of a
    parameter that is used several times are added up in the order they would be otherwise.
    """
    node: Any = result.grad_fn
    node._set_sequence_nr(number)
    return result


def _keep_low_numbers_free() -> None:
    """Have a thread's operations numbered beyond those of late ones: its first forwards would begin at 0."""
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
        and type(input) in (Tensor, nn.Parameter)
        and input.dim() > 1
        and input.is_floating_point()
        and input.requires_grad  # else backward ends here
        and (bias is None or (_of_a_parameter(bias) and bias.dim() == 1))
        # activation checkpointing counts what is saved, and computes it again outside of the block
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _of_a_parameter(tensor: Any) -> bool:
    """Whether it is a parameter or a part of one: then no row waits for its gradient."""
    return type(tensor._base if type(tensor) is Tensor and tensor._is_view() else tensor) is nn.Parameter


def _split(number: int, input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    values = input.to(dtype)
    shape = (*values.shape[:-1], weight.shape[0 if transposed else 1])
    # detached, or the layer before would wait for it
    late = after_the_others(_WeightGradient.apply(values.detach(), weight, bias, transposed, shape), number)
    fixed = weight.detach().to(dtype)
    return _Product.apply(values, late, fixed.t() if transposed else fixed, None if bias is None else bias.detach().to(dtype))


class _Product(torch.autograd.Function):
    # its backward gives the input's gradient, and hands that of the output on to the late operation

    @staticmethod
    def forward(ctx: Any, values: Tensor, late: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        flat = values.reshape(-1, weight.shape[0])
        product = torch.mm(flat, weight) if bias is None else torch.addmm(bias, flat, weight)
        return torch.ops.aten._unsafe_view(product, late.shape)  # to autograd no view, so it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        of_values = torch.mm(gradient.reshape(-1, weight.shape[1]), weight.t())
        return of_values.view(*gradient.shape[:-1], weight.shape[0]), gradient, None, None


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, shape: Sequence[int]
    ) -> Tensor:
        ctx.save_for_backward(values)
        ctx.transposed, ctx.dtype = transposed, weight.dtype
        return values.new_empty(1).expand(shape)  # holds nothing: it is where the gradient comes in

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (values,) = ctx.saved_tensors
        _, of_weight, of_bias, *_ = ctx.needs_input_grad
        flat, into = gradient.reshape(-1, gradient.shape[-1]), values.reshape(-1, values.shape[-1])
        given: list[Tensor | None] = [None, None]
        if of_weight:  # the product that autograd would make, so that every sum runs in its order
            given[0] = (flat.t().mm(into) if ctx.transposed else into.t().mm(flat)).to(ctx.dtype)
        if of_bias:
            given[1] = flat.sum(0).to(ctx.dtype)
        return None, *given, None, None
