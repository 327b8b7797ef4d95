"""The samples of a stream by number, those that are still to be used held, and a way back to them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from lightning_freescale.data.streaming.source import Source, after


class Reader:
    """Reads a source, numbers its samples from 0 in each epoch, and holds those that were read and not yet used.

    Its state holds no samples: it tells a place in the source before the oldest sample held, and which of those that follow
    are held. To resume, they are read again from there.

    Args:
        source: what to read.
        cost: predicted compute time of a sample.
        weight: weight of a sample in the mean loss; one if not given.
        epoch: told to the source.
        seed: of the workers' random numbers.
        state: where to go on, see :meth:`state_dict`; then call :meth:`restore` before anything else.
    """

    def __init__(
        self,
        source: Source,
        cost: Callable[[Any], float],
        weight: Callable[[Any], float] | None = None,
        *,
        epoch: int = 0,
        seed: int = 0,
        state: dict[str, Any] | None = None,
    ) -> None:
        state = state or {"place": source.start(), "first": 0, "held": [], "read": 0, "cost": 0.0}
        self._cost, self._weight, self._state = cost, weight, state
        self._chunks = source.read(state["place"], epoch, seed)
        self._places = deque([(state["first"], state["place"])])
        self._rest: deque[Any] = deque()
        self._held: dict[int, tuple[Any, float, float]] = {}
        self.read: int = state["first"]
        """Samples read in this epoch, which is the number of the next one."""
        self.cost: float = state["cost"]
        """What they cost together."""

    def restore(self) -> None:
        """Read the samples that the state holds; discard those between them."""
        held = set(self._state["held"])
        while self.read < self._state["read"] and self._load():
            if self.read in held:
                self._hold(self._rest[0])
            self._rest.popleft()
            self.read += 1
        if self.read < self._state["read"]:
            raise ValueError(
                f"the data set ended before sample {self._state['read'] - 1}, which the checkpoint's run had read: to resume "
                "inside an epoch a stream must give the same samples again"
            )

    def next(self, count: int) -> range:
        """Numbers of the next ``count`` samples, of fewer if the stream ends."""
        first = self.read
        while self.read < first + count and self._load():
            self.cost += self._hold(self._rest.popleft())
            self.read += 1
        return range(first, self.read)

    def costs(self, numbers: Any) -> list[float]:
        """What each of these samples costs."""
        return [self._held[int(number)][1] for number in numbers]

    def weights(self, numbers: Any) -> list[float]:
        """What each of these samples weighs."""
        return [self._held[int(number)][2] for number in numbers]

    def use(self, numbers: Any) -> list[Any]:
        """These samples, in this order; they are no longer held."""
        return [self._held.pop(int(number))[0] for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        """Where to go on, without samples. Old places are forgotten."""
        oldest = min(self._held, default=self.read)
        while len(self._places) > 1 and self._places[1][0] <= oldest:
            self._places.popleft()
        first, place = self._places[0]
        return {"place": place, "first": first, "held": sorted(self._held), "read": self.read, "cost": self.cost}

    def close(self) -> None:
        """End the source's workers."""
        self._chunks.close()

    def _load(self) -> bool:
        """Have at least one more sample at hand; False at the end of the stream."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self._rest.extend(chunk.samples)
            self._places.append((self.read + len(self._rest), after(self._places[-1][1], chunk)))
        return True

    def _hold(self, sample: Any) -> float:
        cost = self._number("cost", self._cost(sample))
        self._held[self.read] = (sample, cost, 1.0 if self._weight is None else self._number("weight", self._weight(sample)))
        return cost

    def _number(self, name: str, value: Any) -> float:
        number = float(value)
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{name}(sample) is {number} for sample {self.read} of this rank: return a finite number >= 0")
        return number
