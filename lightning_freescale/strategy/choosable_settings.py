"""Which settings of a run may be chosen by measurement, and why others may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_freescale._lightning.loops import rank_zero_info
from lightning_freescale.balance import MicroBatchSchedule

SPLIT_BACKWARD, MICRO_BATCHES = "split_backward", "micro_batches"


def schedule_of(loader: Any) -> MicroBatchSchedule | None:
    """Return the schedule that a training loader cuts its batches by, if there is one."""
    schedule = getattr(getattr(loader, "sampler", None), "micro_batches", None)
    return schedule if isinstance(schedule, MicroBatchSchedule) else None


def may_be_padded(loader: Any) -> bool:
    """Return whether a training loader's batches are padded, or may turn out to be: each micro-batch is padded by itself."""
    return bool(getattr(getattr(loader, "sampler", None), "may_pad", False))


def settle_without_exchange(loader: Any, reason: str) -> bool:
    """Choose one micro-batch for ``"auto"``, if there is a ``reason`` why more cannot help; return whether that was news.

    Whatever a checkpoint has brought: in the run that wrote it, there may have been something to hide.
    """
    schedule = schedule_of(loader)
    if not reason or schedule is None or not schedule.auto or schedule.chosen == 1:
        return False
    schedule.settle(1)
    instead = f", and not {schedule.measured} as measured in the run that wrote the checkpoint" if schedule.measured else ""
    rank_zero_info(f"FreeScaleDataModule(micro_batches='auto'): 1, because {reason}{instead}")
    return True


def hold_micro_batches(loader: Any, kept: Mapping[str, Any]) -> None:
    """Have ``"auto"`` wait until it is tried, with the number that was ``kept`` so far, or else with one."""
    schedule = schedule_of(loader)
    if schedule is not None and schedule.auto:
        kept_number = kept.get(MICRO_BATCHES)
        if kept_number in schedule.candidates:
            schedule.settle(kept_number)
        elif not schedule.decided:
            schedule.settle(1)


def choosable(overlaps: bool, schedule: MicroBatchSchedule | None, hides_nothing: str) -> dict[str, Sequence[Any]]:
    """Return the values of each setting that may change between two steps, by its name; first the one that changes no bits.

    Args:
        overlaps: whether the exchange of any collection is overlapped.
        schedule: of the micro-batches, if there is one.
        hides_nothing: why no exchange is hidden, or not that of all collections; empty if it is.
    """
    settings: dict[str, Sequence[Any]] = {}
    if overlaps:
        settings[SPLIT_BACKWARD] = [False, True]
    if schedule is not None and len(schedule.candidates) > 1 and not hides_nothing:
        settings[MICRO_BATCHES] = schedule.candidates
    return settings


def tell_what_is_choosable(target: float, settings: Mapping[str, Sequence[Any]], hides_nothing: str) -> None:
    """Say what the autopilot chooses from, and what from it does not."""
    if not settings:
        rank_zero_info(
            f"FreeScaleStrategy(target_bubble_reduction={target:g}): there is nothing to choose from, because {hides_nothing}"
        )
        return
    values = "; ".join(f"{name} from {', '.join(map(str, values))}" for name, values in settings.items())
    why_not = hides_nothing or "FreeScaleDataModule(micro_batches='auto') has not been asked for, or leaves one number only"
    left_out = "" if MICRO_BATCHES in settings else f". Not micro_batches, because {why_not}"
    rank_zero_info(f"FreeScaleStrategy(target_bubble_reduction={target:g}): chooses {values}{left_out}")
