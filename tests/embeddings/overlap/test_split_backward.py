"""Backward with the gradients of weights last is bitwise equal to the usual backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_freescale.embeddings.overlap import WeightGradientsLast, WindowGradients

DIM = 8
Make = Callable[[], nn.Module]


class Layers(nn.Module):
    """Calls linear layers in all ways, among other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.inner = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, DIM, bias=False)
        self.mixed, self.bias = nn.Parameter(torch.randn(DIM, DIM)), nn.Parameter(torch.randn(DIM))
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.head = nn.Linear(DIM, 5)

    def forward(self, rows: Tensor) -> Tensor:
        u, v, q, k = F.silu(self.linear(self.norm(rows))).chunk(4, -1)
        mixed = (q @ k.transpose(-1, -2)) @ v + torch.matmul(u, self.mixed) + u.matmul(self.mixed) + u @ self.mixed
        hidden = F.relu_(self.inner(mixed))  # in place
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = hidden + self.attention(self.norm(hidden), hidden, hidden)[0]
        flat = hidden.flatten(0, -2)
        flat = torch.addmm(self.bias, flat, self.mixed) + torch.mm(flat, self.inner.weight) + flat.mm(self.mixed)
        flat = flat + F.linear(flat, self.mixed.t()) + flat.t().contiguous().t() @ self.mixed
        return self.head(flat + self.inner(flat)).logsumexp(-1).sum()


def _frozen() -> nn.Module:
    module = Layers()
    for parameter in (module.linear.weight, module.head.bias, module.mixed, module.attention.in_proj_weight):
        parameter.requires_grad_(False)
    return module


def _accumulates() -> nn.Module:
    module = Layers()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    return module


def _used_once() -> nn.Module:
    """Compare under autocast, where each weight is used once."""
    return nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(inplace=True), nn.LayerNorm(DIM), nn.Linear(DIM, 1), _Mean())


class _Mean(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.float().square().mean()


def _compiled() -> Any:
    torch._dynamo.reset()
    return torch.compile(Layers(), backend="aot_eager")


class Checkpointed(Layers):
    """Recomputes its forward in backward."""

    def forward(self, rows: Tensor) -> Tensor:
        return checkpoint(super().forward, rows, use_reentrant=False) + self.head(rows).sum()


class Unusual(nn.Module):
    """Has complex and sparse operands, no outputs, and an image of another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Parameter(torch.randn(DIM, DIM, dtype=torch.complex64))
        self.weight, self.none, self.channels = nn.Parameter(torch.randn(DIM, 2)), nn.Linear(DIM, 0), nn.Linear(DIM, 3)

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.flatten(0, 1)
        waves = (flat.to(torch.complex64) @ self.complex).abs().square().mean()
        image = rows[..., None].expand(-1, -1, -1, DIM).transpose(0, 2)
        sparse = (flat.to_sparse() @ self.weight).square().mean()
        return waves + sparse + self.none(flat).sum() + self.channels(image).square().mean()


class Order:
    def __init__(self, module: nn.Module) -> None:
        self.names: list[str] = []
        for name, parameter in ((name, each) for name, each in module.named_parameters() if each.requires_grad):
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.names.append(name))

    def rows(self, rows: Tensor) -> Tensor:
        seen = rows * 1.0
        seen.register_hook(lambda _: self.names.append("rows"))
        return seen


def _gradients(make: Make, block: Any, *shape: int, autocast: bool = False) -> tuple[list[Any], list[str]]:
    torch.manual_seed(0)
    module, rows = make(), torch.randn(*shape, DIM, requires_grad=True)
    order = Order(module)
    with block(), torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = module(order.rows(rows))
    loss.backward()
    return [loss.detach(), rows.grad, *(parameter.grad for parameter in module.parameters())], order.names


def _same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    assert [a is None for a in one] == [b is None for b in other]
    assert [i for i, (a, b) in enumerate(zip(one, other)) if a is not None and not torch.equal(a, b)] == []


@pytest.mark.parametrize(("shape", "autocast"), [((3, 7), False), ((3, 7), True), ((0, 7), False)])
def test_same_bits_with_the_rows_first(shape: tuple[int, ...], autocast: bool) -> None:
    plain, before = _gradients(Layers, nullcontext, *shape, autocast=autocast)
    split, after = _gradients(Layers, WeightGradientsLast, *shape, autocast=autocast)
    if autocast:  # autocast sums the gradients of a parameter used several times in bfloat16, and this in float32
        for a, b in zip(plain, split):
            assert (a - b).norm() <= 2**-7 * a.norm(), "bfloat16 rounds to 2**-8"
    else:
        _same(plain, split)
    assert sorted(before) == sorted(after)
    late = {"linear.weight", "inner.weight", "mixed", "bias", "head.weight", "attention.in_proj_weight", "linear.bias"}
    assert late.isdisjoint(after[: after.index("rows")])
    assert not late.isdisjoint(before[: before.index("rows")]), "else the test could not fail"


@pytest.mark.parametrize(
    ("make", "autocast"),
    [(_frozen, False), (Checkpointed, False), (_accumulates, False), (Unusual, False), (_compiled, False), (_used_once, True)],
)
def test_same_bits_in_modules_as_people_write_them(make: Make, autocast: bool) -> None:
    plain, _ = _gradients(make, nullcontext, 3, 7, autocast=autocast)
    split, order = _gradients(make, WeightGradientsLast, 3, 7, autocast=autocast)
    _same(plain, split)
    assert make is not _used_once or order.index("rows") < order.index("0.weight")


def test_one_layer() -> None:
    """Check that the gradient is laid out as the parameter, and that second derivatives and changes in place raise errors."""
    layer = nn.Linear(DIM, 3)

    def recorded() -> tuple[Tensor, Tensor]:
        rows = torch.randn(4, DIM, requires_grad=True) * 1.0
        with WeightGradientsLast():
            return rows, layer(rows).square().sum()

    recorded()[1].backward()
    assert layer.weight.grad is not None and layer.weight.grad.stride() == layer.weight.stride()
    rows, loss = recorded()
    (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    rows, loss = recorded()
    rows.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with WeightGradientsLast(), torch.no_grad():
        assert layer(torch.randn(4, DIM)).grad_fn is None


class UsedOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, 1, bias=False)
        self.mixed = nn.Parameter(torch.randn(3 * DIM, 3 * DIM))

    def forward(self, rows: Tensor, skip: bool = False) -> Tensor:
        hidden = F.relu_(self.first(rows))
        return (hidden if skip else self.last(hidden @ self.mixed)).square().mean()


class OneStorage(UsedOnce):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Parameter(self.mixed.detach())

    def forward(self, rows: Tensor, skip: bool = False) -> Tensor:
        return (F.relu(self.first(rows)) @ self.mixed @ self.again).square().mean() + self.last.weight.sum()


class Slices(UsedOnce):
    def forward(self, rows: Tensor, skip: bool = False) -> Tensor:
        hidden = self.first(rows)[:, : len(rows)] @ self.mixed[: len(rows)]
        return self.last(hidden).square().mean()


def _hooked() -> nn.Module:
    """Check that a hook that is not linear gets every gradient."""
    module = UsedOnce()
    module.mixed.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return module


class AsksInForward(UsedOnce):
    def forward(self, rows: Tensor, skip: bool = False) -> Tensor:
        loss = super().forward(rows)
        (gradient,) = torch.autograd.grad(loss, rows, retain_graph=True)
        return loss + gradient.square().sum()


def _window(make: Make, window: WindowGradients | None) -> tuple[list[Any], list[str]]:
    torch.manual_seed(0)
    module, parts = make(), [torch.randn(size, DIM, requires_grad=True) for size in (5, 1, 3)]
    order = Order(module)
    for number, rows in enumerate(parts):
        with nullcontext() if window is None else WeightGradientsLast(window, last=number == 2):
            loss = module(order.rows(rows))
        with nullcontext() if window is None else window.backward():
            loss.backward()
    if window is not None:
        window.close()
    return [rows.grad for rows in parts] + [parameter.grad for parameter in module.parameters()], order.names


@pytest.mark.parametrize("make", [UsedOnce, OneStorage, Slices, _hooked, AsksInForward])
def test_a_window_has_the_gradients_of_all_its_weights_at_its_end(make: Make) -> None:
    split, order = _window(make, WindowGradients())
    _same(_window(make, None)[0], split)
    if make is UsedOnce:
        assert order[:3] == ["rows"] * 3
        assert len(order) == 3 + len(list(UsedOnce().parameters()))


def test_layers_that_the_last_of_a_window_leaves_out_are_an_error() -> None:
    module, window = UsedOnce(), WindowGradients()
    for last in (False, True):
        with WeightGradientsLast(window, last=last):
            loss = module(torch.randn(4, DIM, requires_grad=True), skip=last)
        with window.backward():
            loss.backward()
    with pytest.raises(RuntimeError, match=r"\(1, 24\)"):
        window.close()
    window.close()
    with pytest.raises(ValueError, match="requires a window"):
        WeightGradientsLast(last=False)
