"""The optimizer of a sharded table, derived from a parameter group of the user's optimizer."""

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

# values that an option must have, because FBGEMM's fused update supports no others
_PLAIN = {"weight_decay": 0, "maximize": False}
_DEMANDS: dict[type[Optimizer], dict[str, Any]] = {
    torch.optim.SGD: {**_PLAIN, "momentum": 0},
    torch.optim.Adagrad: {**_PLAIN, "lr_decay": 0},
    RowWiseAdagrad: {**_PLAIN, "lr_decay": 0},
    torch.optim.Adam: {**_PLAIN, "amsgrad": False},
    torch.optim.AdamW: {"maximize": False, "amsgrad": False, "decoupled_weight_decay": True},
}
# the class that TorchRec translates to FBGEMM's fused optimizer; FBGEMM's Adam decays weights like AdamW
_FUSED: dict[type[Optimizer], type[Optimizer]] = {torch.optim.AdamW: torch.optim.Adam}
_SET_BY = {"momentum": " If OneCycleLR sets it, pass cycle_momentum=False."}
_NOT_ON_CPU = (torch.optim.Adam, torch.optim.AdamW)
_ON_CPU = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)


@dataclass(frozen=True)
class UpdateSettings:
    """The settings of a table's update in one step."""

    step: int  # number of earlier updates of the table
    options: Mapping[str, float] = field(default_factory=dict)  # by FBGEMM's names; missing options do not change
    frozen: bool = False  # whether the step does not update the table

    @property
    def clipped(self) -> bool:
        """Whether gradient clipping includes the table. torch clips parameters of parameter groups that have a gradient."""
        return bool(self.options) and not self.frozen


@dataclass(frozen=True)
class TableOptimizer:
    """The optimizer that updates one table during backward."""

    fused_class: type[Optimizer]  # class that TorchRec translates for FBGEMM
    arguments: dict[str, Any] = field(default_factory=dict)  # by FBGEMM's names
    group: int | None = None  # index of the user's parameter group that contains the table and sets its options
    initial_state: float = 0.0  # initial value of accumulated squares
    sparse_adam: bool = False  # whether the overlap engine updates the table with update_rows, because FBGEMM cannot

    @property
    def state_from_start(self) -> bool:
        """Whether torch's optimizer creates its states before the first update."""
        return self.fused_class in (torch.optim.Adagrad, RowWiseAdagrad)

    @property
    def moves_without_gradient(self) -> bool:
        """Whether an update with a zero gradient changes a row or its state."""
        return self.fused_class not in (torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad)

    @classmethod
    def from_applied_in_backward(
        cls, weight: Any, table: str, device: torch.device, sparse_adam: bool = False
    ) -> TableOptimizer | None:
        """Return the optimizer that ``apply_optimizer_in_backward`` has set for an unsharded ``weight``, if any."""
        if not hasattr(weight, "_optimizer_classes"):
            return None
        classes, arguments = weight._optimizer_classes, dict(weight._optimizer_kwargs[0])
        names = [kind.__name__ for kind in classes]
        if len(classes) != 1:
            raise ValueError(f"table {table!r} has several optimizers applied in backward, {names}. Apply only one.")
        applied = f"{names[0]} is applied in backward to table {table!r}"
        try:
            kind = optimizer_type_to_emb_opt_type(classes[0])
        except ValueError as error:
            raise ValueError(f"{applied}, but FBGEMM has no fused version of it: {error}") from error
        if device.type == "cpu" and sparse_adam and classes[0] in _NOT_ON_CPU:
            for name in ("amsgrad", "maximize"):
                if arguments.get(name):
                    raise ValueError(
                        f"{names[0]}({name}=True) is applied in backward to table {table!r}. {name} is not supported on CPU. "
                        "Remove it."
                    )
            if "betas" in arguments:
                arguments["beta1"], arguments["beta2"] = arguments.pop("betas")
            return cls(classes[0], {"lr": 1e-3, **arguments}, sparse_adam=True)
        if device.type == "cpu" and kind not in _ON_CPU:
            raise ValueError(
                f"{applied}, but FBGEMM does not support it on CPU. Apply SGD, Adagrad or RowWiseAdagrad, or train on a GPU."
            )
        return cls(classes[0], arguments)

    @classmethod
    def from_parameter_group(
        cls, optimizer: Optimizer, group: int, table: str, device: torch.device, sparse_adam: bool = False
    ) -> TableOptimizer:
        """Return the fused optimizer that is equivalent to ``optimizer`` for a table of its parameter group ``group``."""
        kind = type(optimizer)
        if kind not in _DEMANDS:
            raise ValueError(
                f"{kind.__name__} contains the embedding table {table!r}, but no fused optimizer is equivalent. Use SGD, "
                "Adagrad, RowWiseAdagrad, Adam or AdamW for the table, or apply another optimizer to it with "
                "torchrec.optim.apply_optimizer_in_backward."
            )
        for name, value, demanded in unsupported_options(optimizer, group):
            raise ValueError(
                f"{kind.__name__}({name}={value!r}) contains the embedding table {table!r}, but the fused update of tables "
                f"does not support it. Put the table into a parameter group with {name}={demanded!r}.{_SET_BY.get(name, '')}"
            )
        without_fused = device.type == "cpu" and kind in _NOT_ON_CPU
        if without_fused and not sparse_adam:
            raise ValueError(
                f"{kind.__name__} contains the embedding table {table!r}, but FBGEMM does not support Adam on CPU. Use an "
                "overlapped exchange (FreeScaleStrategy(overlap=True)), which has its own Adam, use SGD, Adagrad or "
                "torchrec.optim.RowWiseAdagrad for the table, or train on a GPU."
            )
        initial = optimizer.defaults.get("initial_accumulator_value", 0.0)  # torch ignores the value of a parameter group
        return cls(_FUSED.get(kind, kind), followed_options(optimizer, group), group, initial, without_fused)


def state_shapes(
    kind: type[Optimizer], options: Mapping[str, Any], shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of an optimizer's states for a parameter, except the number of updates; None if they are unknown."""
    if issubclass(kind, (torch.optim.Adam, torch.optim.AdamW)):
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return dict.fromkeys(names if options.get("amsgrad") else names[:2], shape)
    found: dict[type[Optimizer], dict[str, tuple[int, ...]]] = {
        torch.optim.SGD: {"momentum_buffer": shape} if options.get("momentum") else {},
        torch.optim.Adagrad: {"sum": shape},
        RowWiseAdagrad: {"sum": (shape[0], 1)},
    }
    return found.get(kind)


def followed_options(optimizer: Optimizer, group: int) -> dict[str, float]:
    """Return the current options of a parameter group that its tables use, by FBGEMM's names."""
    settings = optimizer.param_groups[group]
    options = {"lr": float(settings["lr"])}
    if "eps" in settings:
        options["eps"] = float(settings["eps"])
    if type(optimizer) in _NOT_ON_CPU:
        options["beta1"], options["beta2"] = (float(beta) for beta in settings["betas"])
        options["weight_decay"] = float(settings["weight_decay"])
    return options


def unsupported_options(optimizer: Optimizer, group: int) -> list[tuple[str, Any, Any]]:
    """Return the options of a parameter group that tables do not support, as tuples of name, value and required value."""
    settings, demands = optimizer.param_groups[group], _DEMANDS[type(optimizer)]
    given = [(name, settings.get(name, demanded), demanded) for name, demanded in demands.items()]
    return [(name, value, demanded) for name, value, demanded in given if value != demanded]


FROZEN = TableOptimizer(torch.optim.SGD, {"lr": 0.0})


def new_state(weight: Tensor) -> dict[str, Tensor]:
    """Return the initial state of Adam for a shard, by torch's names; each tensor has the shape of ``weight``."""
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
    """Make one step of Adam for distinct ``rows``, in place. Other rows keep their moments, as in torch's SparseAdam.

    ``weight`` has shape ``[all rows, dim]``, ``gradients`` has shape ``[rows, dim]``, and ``step`` is the number of earlier
    updates. Source: Kingma and Ba (arXiv 1412.6980), with decoupled weight decay (arXiv 1711.05101). ``eps`` is added to the
    corrected root, as in FBGEMM and ``torch.optim.Adam``.
    """
    beta1, beta2 = arguments.get("beta1", 0.9), arguments.get("beta2", 0.999)
    weight = weight.data  # torch's count of writes must contain only the user's writes; it does not count writes to data
    first = state["exp_avg"][rows].lerp_(gradients, 1 - beta1)
    second = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    state["exp_avg"][rows], state["exp_avg_sq"][rows] = first, second
    root = (second / (1 - beta2 ** (step + 1))).sqrt_().add_(arguments.get("eps", 1e-8))
    change = (first / (1 - beta1 ** (step + 1))).div_(root)
    old = weight[rows].float()
    weight[rows] = (old - arguments["lr"] * (change + arguments.get("weight_decay", 0.0) * old)).to(weight.dtype)
