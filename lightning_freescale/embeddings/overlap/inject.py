"""Where rows enter the autograd graph, and their gradient leaves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def inject(rows: Tensor, take: Callable[[Tensor], None]) -> Tensor:
    """``rows`` as part of the graph; when backward gets there, ``take`` is called with their gradient."""
    return _Inject.apply(rows, torch.empty(0, device=rows.device, requires_grad=True), take)


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.take(gradient.contiguous())
        return None, None, None
