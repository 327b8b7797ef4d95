"""Errors of what cannot be done exactly, or would leave ranks waiting: each says what, and how else."""

from __future__ import annotations

from typing import NoReturn


def second_backward(path: str) -> NoReturn:
    """Raise because the gradient of rows came again, or too late."""
    raise ValueError(
        f"embedding collection {path!r}: a second backward through the rows of one lookup, or one after its step has ended. "
        "Call backward once per batch, on the sum of the losses"
    )


def second_update(path: str) -> NoReturn:
    """Raise because TorchRec's backward would have to run an optimizer that it does not have."""
    raise ValueError(
        f"embedding collection {path!r} is looked up outside of a step, or twice in one, and its optimizer on CPU updates a "
        "table once per step: look all features up in one call, or use SGD, Adagrad or RowWiseAdagrad for it"
    )


def second_lookup_in_window(path: str) -> NoReturn:
    """Raise because TorchRec's backward would update while gradients are accumulated."""
    raise ValueError(
        f"embedding collection {path!r} is looked up twice in a step while gradients are accumulated, which plain TorchRec "
        "cannot: look all features up in one call"
    )


def no_gradient(path: str) -> NoReturn:
    """Raise because rows were looked up for nothing, and would move."""
    raise ValueError(
        f"embedding collection {path!r} was looked up, but no gradient came back: its optimizer would move the rows all the "
        "same. Look it up under torch.no_grad() where the loss does not need it"
    )


def unannounced_write(path: str) -> NoReturn:
    """Raise because somebody has written the tables."""
    raise RuntimeError(
        f"the tables of embedding collection {path!r} were written while updates were still under way or rows fetched ahead: "
        "write them inside `with trainer.strategy.writing_tables():`, or `with engine.writing():` in a loop of your own, on "
        "every rank"
    )


def uneven_ends(ended: list[int], step: int) -> NoReturn:
    """Raise because some ranks have another batch, and some have not."""
    raise RuntimeError(
        f"ranks {ended} have no batch after step {step}, others have: give every rank the same number of batches"
    )
