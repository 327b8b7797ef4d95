"""The optimizer of a sharded table, derived from the user's optimizer, whose parameter groups continue to set its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.optim import Optimizer
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

# what a table may not ask for, because FBGEMM's fused update cannot do it: {argument: value it must have}
_PLAIN = {"weight_decay": 0, "maximize": False}
_DEMANDS: dict[type[Optimizer], dict[str, Any]] = {
    torch.optim.SGD: {**_PLAIN, "momentum": 0},
    torch.optim.Adagrad: {**_PLAIN, "lr_decay": 0},
    RowWiseAdagrad: {**_PLAIN, "lr_decay": 0},
    torch.optim.Adam: {**_PLAIN, "amsgrad": False},
    torch.optim.AdamW: {"maximize": False, "amsgrad": False, "decoupled_weight_decay": True},
}
# the class TorchRec translates to FBGEMM's fused optimizer; its Adam decays weights the way AdamW does
_FUSED: dict[type[Optimizer], type[Optimizer]] = {torch.optim.AdamW: torch.optim.Adam}
_SET_BY = {"momentum": "; where a scheduler sets it, OneCycleLR(cycle_momentum=False) does not"}
_NOT_ON_CPU = (torch.optim.Adam, torch.optim.AdamW)
_ON_CPU = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)


@dataclass(frozen=True)
class UpdateSettings:
    """What a table's update in one step is computed with.

    Attributes:
        step: updates of the table done before it.
        options: of its parameter group in that step, in FBGEMM's words; those left out stay as they are.
        frozen: whether there is no update.
    """

    step: int
    options: Mapping[str, float] = field(default_factory=dict)
    frozen: bool = False

    @property
    def clipped(self) -> bool:
        """Whether clipping takes the table in: torch clips what a parameter group holds and has a gradient."""
        return bool(self.options) and not self.frozen


@dataclass(frozen=True)
class TableOptimizer:
    """How one table is updated during backward.

    Attributes:
        fused_class: optimizer class that TorchRec translates for FBGEMM.
        arguments: its arguments, in FBGEMM's words.
        group: which of the user's parameter groups holds the table and sets its options; None if none does.
        initial_state: value the accumulated squares start from.
        sparse_adam: whether the overlap engine updates the table by :func:`update_rows`, because FBGEMM cannot.
    """

    fused_class: type[Optimizer]
    arguments: dict[str, Any] = field(default_factory=dict)
    group: int | None = None
    initial_state: float = 0.0
    sparse_adam: bool = False

    @property
    def state_from_start(self) -> bool:
        """Whether torch's optimizer has the state of a table that it has never updated."""
        return self.fused_class in (torch.optim.Adagrad, RowWiseAdagrad)

    @property
    def moves_without_gradient(self) -> bool:
        """Whether an update by a gradient of zero changes a row or its state."""
        return self.fused_class not in (torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad)

    @classmethod
    def from_applied_in_backward(
        cls, weight: Any, table: str, device: torch.device, sparse_adam: bool = False
    ) -> TableOptimizer | None:
        """Return the optimizer that TorchRec's ``apply_optimizer_in_backward`` has put on an unsharded ``weight``, if any.

        Raises:
            ValueError: there are several, or FBGEMM has none that does the same on ``device``.
        """
        if not hasattr(weight, "_optimizer_classes"):
            return None
        classes, arguments = weight._optimizer_classes, dict(weight._optimizer_kwargs[0])
        names = [kind.__name__ for kind in classes]
        if len(classes) != 1:
            raise ValueError(f"table {table!r} has several optimizers applied in backward, {names}: apply one")
        told = f"{names[0]}, applied in backward to table {table!r}"
        try:
            kind = optimizer_type_to_emb_opt_type(classes[0])
        except ValueError as error:
            raise ValueError(f"{told}, has no fused form in FBGEMM: {error}") from error
        if device.type == "cpu" and sparse_adam and classes[0] in _NOT_ON_CPU:
            for name in ("amsgrad", "maximize"):
                if arguments.get(name):
                    raise ValueError(f"{names[0]}({name}=True), applied in backward to table {table!r}: leave it out on CPU")
            if "betas" in arguments:
                arguments["beta1"], arguments["beta2"] = arguments.pop("betas")
            return cls(classes[0], {"lr": 1e-3, **arguments}, sparse_adam=True)
        if device.type == "cpu" and kind not in _ON_CPU:
            raise ValueError(f"{told}, is not there in FBGEMM on CPU: apply SGD, Adagrad or RowWiseAdagrad, or train on a GPU")
        return cls(classes[0], arguments)

    @classmethod
    def from_parameter_group(
        cls, optimizer: Optimizer, group: int, table: str, device: torch.device, sparse_adam: bool = False
    ) -> TableOptimizer:
        """Return the fused optimizer that does what ``optimizer`` does for a table of its parameter group ``group``.

        Raises:
            ValueError: no fused optimizer does the same; the message names the table, the setting and the fix.
        """
        kind = type(optimizer)
        if kind not in _DEMANDS:
            raise ValueError(
                f"{kind.__name__} holds the embedding table {table!r}, and no fused optimizer does what it does. Use SGD, "
                "Adagrad, RowWiseAdagrad, Adam or AdamW for the table's parameters, or give the table an optimizer of its own "
                "with torchrec.optim.apply_optimizer_in_backward"
            )
        for name, value, demanded in unsupported_options(optimizer, group):
            raise ValueError(
                f"{kind.__name__}({name}={value!r}) holds the embedding table {table!r}, which is updated row by row during "
                f"backward: put the table into a parameter group with {name}={demanded!r}{_SET_BY.get(name, '')}"
            )
        without_fused = device.type == "cpu" and kind in _NOT_ON_CPU
        if without_fused and not sparse_adam:
            raise ValueError(
                f"{kind.__name__} holds the embedding table {table!r}, but FBGEMM has no Adam on CPU, and only a collection "
                "whose exchange is overlapped (FreeScaleStrategy(overlap=True)) does without. Put the table's parameters into "
                "SGD, Adagrad or RowWiseAdagrad (torchrec.optim.RowWiseAdagrad), or train on a GPU"
            )
        initial = optimizer.defaults.get("initial_accumulator_value", 0.0)  # torch ignores a parameter group's own
        return cls(_FUSED.get(kind, kind), followed_options(optimizer, group), group, initial, without_fused)


def followed_options(optimizer: Optimizer, group: int) -> dict[str, float]:
    """Return the options that a parameter group has now and that the updates of its tables follow, in FBGEMM's words."""
    settings = optimizer.param_groups[group]
    options = {"lr": float(settings["lr"])}
    if "eps" in settings:
        options["eps"] = float(settings["eps"])
    if type(optimizer) in _NOT_ON_CPU:
        options["beta1"], options["beta2"] = (float(beta) for beta in settings["betas"])
        options["weight_decay"] = float(settings["weight_decay"])
    return options


def unsupported_options(optimizer: Optimizer, group: int) -> list[tuple[str, Any, Any]]:
    """Return the options of a parameter group that updates of tables cannot follow: name, value, and what it must be."""
    settings, demands = optimizer.param_groups[group], _DEMANDS[type(optimizer)]
    given = [(name, settings.get(name, demanded), demanded) for name, demanded in demands.items()]
    return [(name, value, demanded) for name, value, demanded in given if value != demanded]


FROZEN = TableOptimizer(torch.optim.SGD, {"lr": 0.0})


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
