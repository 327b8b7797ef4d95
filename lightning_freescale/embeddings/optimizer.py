"""Derive the optimizer that updates a sharded table from the one the user configured for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
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
    torch.optim.AdamW: {"maximize": False, "amsgrad": False},
}
# the class TorchRec translates to FBGEMM's fused optimizer; its Adam decays weights the way AdamW does
_FUSED: dict[type[Optimizer], type[Optimizer]] = {torch.optim.AdamW: torch.optim.Adam}
_NOT_ON_CPU = (torch.optim.Adam, torch.optim.AdamW)
_ON_CPU = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)


@dataclass(frozen=True)
class TableOptimizer:
    """How one table is updated during backward.

    Attributes:
        fused_class: optimizer class that TorchRec translates for FBGEMM.
        arguments: its arguments, in FBGEMM's words.
        group: which of the user's parameter groups holds the table and sets its learning rate; None if none does.
        initial_state: value the accumulated squares start from.
        by_row: whether the overlap engine updates the table, because FBGEMM cannot.
    """

    fused_class: type[Optimizer]
    arguments: dict[str, Any] = field(default_factory=dict)
    group: int | None = None
    initial_state: float = 0.0
    by_row: bool = False

    @property
    def moves_without_gradient(self) -> bool:
        """Whether an update by a gradient of zero changes a row or its state."""
        return self.fused_class not in (torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad)


FROZEN = TableOptimizer(torch.optim.SGD, {"lr": 0.0})


def has_row_wise_state(optimizer: TableOptimizer) -> bool:
    """Whether its state has one value per row."""
    return "rowwise" in optimizer.fused_class.__name__.lower()


def applied_in_backward(
    classes: list[Any], arguments: list[Any], table: str, device: torch.device, by_row: bool = False
) -> TableOptimizer:
    """An optimizer that the user applied in backward; ``by_row`` if the overlap engine may update the table.

    Raises:
        ValueError: there are several, or FBGEMM has none that does the same on ``device``.
    """
    names = [kind.__name__ for kind in classes]
    if len(classes) != 1:
        raise ValueError(f"table {table!r} has several optimizers applied in backward, {names}: apply one")
    try:
        kind = optimizer_type_to_emb_opt_type(classes[0])
    except ValueError as error:
        raise ValueError(f"{names[0]}, applied in backward to table {table!r}, has no fused form in FBGEMM: {error}") from error
    if device.type == "cpu" and by_row and classes[0] in _NOT_ON_CPU:
        for name in ("amsgrad", "maximize"):
            if arguments[0].get(name):
                raise ValueError(f"{names[0]}({name}=True), applied in backward to table {table!r}: leave it out on CPU")
        return TableOptimizer(classes[0], _in_fbgemms_words(dict(arguments[0])), by_row=True)
    if device.type == "cpu" and kind not in _ON_CPU:
        raise ValueError(
            f"{names[0]}, applied in backward to table {table!r}, is not there in FBGEMM on CPU: apply SGD, Adagrad or "
            "RowWiseAdagrad, or train on a GPU"
        )
    return TableOptimizer(classes[0], dict(arguments[0]))


def derive(optimizer: Optimizer, group: int, table: str, device: torch.device, by_row: bool = False) -> TableOptimizer:
    """The fused optimizer that does what ``optimizer`` does for the tables of its parameter group ``group``.

    ``by_row`` if the overlap engine may update the table.

    Raises:
        ValueError: no fused optimizer does the same; the message names the table, the setting and the fix.
    """
    kind, settings = type(optimizer), optimizer.param_groups[group]
    if kind not in _DEMANDS:
        raise ValueError(
            f"{kind.__name__} holds the embedding table {table!r}, and no fused optimizer does what it does. Use SGD, "
            "Adagrad, RowWiseAdagrad, Adam or AdamW for the table's parameters, or give the table an optimizer of its own "
            "with torchrec.optim.apply_optimizer_in_backward"
        )
    for name, demanded in _DEMANDS[kind].items():
        if settings.get(name, demanded) != demanded:
            raise ValueError(
                f"{kind.__name__}({name}={settings[name]!r}) holds the embedding table {table!r}, which is updated row by row "
                f"during backward: put the table into a parameter group with {name}={demanded!r}"
            )
    here = device.type == "cpu" and kind in _NOT_ON_CPU
    if here and not by_row:
        raise ValueError(
            f"{kind.__name__} holds the embedding table {table!r}, but FBGEMM has no Adam on CPU, and only an "
            "EmbeddingCollection under FreeScaleStrategy(overlap=True) does without. Put the table's parameters into SGD, "
            "Adagrad or RowWiseAdagrad (torchrec.optim.RowWiseAdagrad), or train on a GPU"
        )
    initial = optimizer.defaults.get("initial_accumulator_value", 0.0)  # torch ignores a parameter group's own
    return TableOptimizer(_FUSED.get(kind, kind), _arguments(kind, settings), group, initial, by_row=here)


def _arguments(kind: type[Optimizer], settings: dict[str, Any]) -> dict[str, Any]:
    arguments = {"lr": float(settings["lr"])}
    if "eps" in settings:
        arguments["eps"] = settings["eps"]
    if kind in _NOT_ON_CPU:
        arguments["beta1"], arguments["beta2"] = settings["betas"]
        arguments["weight_decay"] = settings["weight_decay"]
    return arguments


def _in_fbgemms_words(arguments: dict[str, Any]) -> dict[str, Any]:
    if "betas" in arguments:
        arguments["beta1"], arguments["beta2"] = arguments.pop("betas")
    return {"lr": 1e-3, **arguments}
