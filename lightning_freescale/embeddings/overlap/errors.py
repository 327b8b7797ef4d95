"""Errors of what cannot be done exactly, or would leave ranks waiting: each says what, and how else."""

from __future__ import annotations

from typing import NoReturn


def second_backward(path: str) -> NoReturn:
    """Raise because the gradient of rows came again, or too late."""
    raise ValueError(
        f"embedding collection {path!r}: a second backward through the rows of one lookup, or one after its step has ended. "
        "Call backward once per batch, on the sum of the losses"
    )


def update_outside_of_step(path: str) -> NoReturn:
    """Raise because a gradient of rows has come for which no step updates tables."""
    raise ValueError(
        f"embedding collection {path!r}: backward through rows that were looked up outside of a training step would not update "
        "its tables. Look them up in training_step, or under torch.no_grad() if the tables need no gradient"
    )


def late_lookup(path: str) -> NoReturn:
    """Raise because rows are looked up after the gradients of their step have been sent."""
    raise ValueError(
        f"embedding collection {path!r} is looked up after the backward of its step has come by its other lookups, or after a "
        "training_step without any: look everything up in training_step, before backward"
    )


def lookup_in_backward(path: str) -> NoReturn:
    """Raise because backward looks up what the step has not."""
    raise ValueError(
        f"embedding collection {path!r} is looked up during backward, which the forward had not done with these ids: for "
        "activation checkpointing pass use_reentrant=False, and change no ids meanwhile"
    )


def unannounced_write(path: str) -> NoReturn:
    """Raise because somebody has written the tables."""
    raise RuntimeError(
        f"the tables of embedding collection {path!r} were written while updates were still under way or rows fetched ahead: "
        "write them inside `with trainer.strategy.writing_tables():`, or `with engine.writing():` in a loop of your own, on "
        "every rank"
    )


def other_sharding(path: str) -> NoReturn:
    """Raise because accumulated gradients are of rows that other ranks own now."""
    raise ValueError(
        f"the checkpoint was written between two optimizer steps, and embedding collection {path!r} is sharded otherwise than "
        "it was then: resume with the same plan=, or from a checkpoint that was written after an optimizer step"
    )


def uneven_ends(ended: list[int], step: int) -> NoReturn:
    """Raise because some ranks have another batch, and some have not."""
    raise RuntimeError(
        f"ranks {ended} have no batch after step {step}, others have: give every rank the same number of batches"
    )
