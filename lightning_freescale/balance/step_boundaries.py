"""Where the steps of an epoch begin and end in its order."""

from __future__ import annotations


class StepBoundaries:
    """Cuts ``samples`` into steps of ``batch_size * ranks``.

    Unless ``drop_last``, an incomplete last step is one of its own, or joins the one before if it has fewer samples than
    ranks: every rank always has a sample.

    Raises:
        ValueError: there is no step.
    """

    def __init__(self, samples: int, batch_size: int, ranks: int, drop_last: bool) -> None:
        if samples < ranks:
            raise ValueError(
                f"{samples} samples for {ranks} ranks: every rank needs at least one sample per step. Use at most {samples} "
                "devices or add samples."
            )
        self.samples, self.per_step, self.ranks, self.drop_last = samples, batch_size * ranks, ranks, drop_last
        self.whole = self._cut(0)
        self._resumed: tuple[int, list[int], int] = (0, self.whole, 0)
        if len(self.whole) == 1:
            raise ValueError(
                f"drop_last=True leaves no step: {samples} samples are fewer than batch_size={batch_size} x {ranks} ranks. "
                "Use drop_last=False or a smaller batch_size."
            )

    def of(self, epoch: int) -> list[int]:
        """``steps + 1`` positions; those before a resume all stand where it went on."""
        return self._resumed[1] if epoch == self._resumed[0] else self.whole

    def first(self, epoch: int) -> int:
        """The step that an epoch starts with."""
        return self._resumed[2] if epoch == self._resumed[0] else 0

    def resume(self, epoch: int, batches: int, samples: int | None) -> None:
        """Go on in ``epoch`` after ``batches`` steps that had ``samples`` samples."""
        if samples is None or self.whole[: batches + 1][-1] == samples:
            self._resumed = (epoch, self.whole, batches)
            return
        left = self.samples - samples
        if 0 < left < self.ranks and not self.drop_last:
            raise ValueError(
                f"{left} samples are left of epoch {epoch}, fewer than the {self.ranks} ranks: resume on at most {left} ranks, "
                "or from a checkpoint made at the end of an epoch"
            )
        self._resumed = (epoch, [samples] * batches + self._cut(samples), batches)

    def _cut(self, start: int) -> list[int]:
        edges = list(range(start, self.samples + 1, self.per_step))
        rest = self.samples - edges[-1]
        if not rest or self.drop_last:
            return edges
        if rest < self.ranks and len(edges) > 1:
            edges.pop()
        return [*edges, self.samples]
