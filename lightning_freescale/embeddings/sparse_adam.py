"""Adam for the rows that a step touches, where FBGEMM has none: on CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def new_state(weight: Tensor) -> dict[str, Tensor]:
    """The state of a shard that has not been updated, by torch's names; each of the shard's shape."""
    return {name: torch.zeros(weight.shape, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}


@torch.no_grad()
def update_rows(
    weight: Tensor,
    state: Mapping[str, Tensor],
    rows: Tensor,
    gradients: Tensor,
    arguments: Mapping[str, Any],
    step: int,
) -> None:
    """One step of Adam for some rows, in place; the others keep their moments, as in FBGEMM and in torch's SparseAdam.

    The formula is that of Kingma and Ba (arXiv 1412.6980) with decoupled weight decay (arXiv 1711.05101), ``eps`` beside the
    corrected root as in FBGEMM and ``torch.optim.Adam``.

    Args:
        weight: shape ``[all rows, dim]``.
        state: what :func:`new_state` returned.
        rows: shape ``[rows]``, each row once.
        gradients: shape ``[rows, dim]``.
        arguments: ``lr``, ``beta1``, ``beta2``, ``eps``, ``weight_decay``.
        step: updates done before this one.
    """
    beta1, beta2 = arguments.get("beta1", 0.9), arguments.get("beta2", 0.999)
    weight = weight.data  # torch counts writes to find those that are not ours; data is outside of the count
    first = state["exp_avg"][rows].lerp_(gradients, 1 - beta1)
    second = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    state["exp_avg"][rows], state["exp_avg_sq"][rows] = first, second
    root = (second / (1 - beta2 ** (step + 1))).sqrt_().add_(arguments.get("eps", 1e-8))
    change = (first / (1 - beta1 ** (step + 1))).div_(root)
    old = weight[rows]
    weight[rows] = old - arguments["lr"] * (change + arguments.get("weight_decay", 0.0) * old)
