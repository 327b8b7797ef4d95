"""The callback by which a script is profiled that does not know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_freescale._lightning.loops import Callback, LightningModule, Trainer, rank_zero_info
from lightning_freescale.callbacks.bubble_profiler import BubbleProfiler


class AddedProfiler(Callback):
    """Puts a :class:`BubbleProfiler` before itself among the Trainer's callbacks when a fit begins, unless there is one.

    It waits for the fit because only then all callbacks are known: those of ``configure_callbacks`` join late. It stays to give
    each further fit of the Trainer a folder of its own, so that nothing of an earlier one is overwritten.

    Args:
        options: for the BubbleProfiler.
        fits: a file to which each rank adds a line with its number in each fit that it begins.
    """

    def __init__(self, options: dict[str, Any], fits: str) -> None:
        self.options, self.fits = options, Path(fits)
        self._profiler: BubbleProfiler | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if stage != "fit" or self not in callbacks:  # a list given to two Trainers gets two of these
            return
        # both are collective: a rank that Lightning has started counts its own fits, and may have begun more of them
        number = trainer.strategy.broadcast(self._count_fit(trainer.global_rank))
        folder = self._folder(trainer.log_dir or trainer.default_root_dir, number)
        if self._profiler is not None and self._profiler in callbacks:
            self._profiler.dirpath = folder
            return
        if any(isinstance(callback, BubbleProfiler) for callback in callbacks):
            rank_zero_info("profile: the script's own BubbleProfiler profiles this fit; options before the script do not hold")
            return
        self._profiler = profiler = BubbleProfiler(**self.options | {"dirpath": folder})
        kept = [callback for callback in callbacks if callback is self or not isinstance(callback, AddedProfiler)]
        at = kept.index(self)
        trainer.callbacks = [*kept[:at], profiler, *kept[at:]]  # type: ignore[attr-defined]
        profiler.setup(trainer, pl_module, stage)

    def _count_fit(self, rank: int) -> int:
        with self.fits.open("a+") as file:
            file.write(f"{rank}\n")
            file.seek(0)
            return file.read().split().count(str(rank))

    def _folder(self, log_dir: str, number: int) -> Path | None:
        """Return the folder of the ``number``th fit of the run; None for the profiler's own choice."""
        given = self.options["dirpath"]
        if number == 1:
            return given and Path(given)
        base = Path(given) if given else Path(log_dir) / "bubbles"
        return base.with_name(f"{base.name}_{number}")  # the first one's files stay
