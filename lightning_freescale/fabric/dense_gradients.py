"""What a loop does with the dense gradients between two steps: those of the tables are elsewhere and must follow."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from enum import Enum
from typing import Any

from torch import Tensor


class SinceThen(Enum):
    """What has become of the gradients."""

    ZEROED = "zero_grad"
    SAME = "nothing"
    CHANGED = "written to, which may have set them to zero"


class DenseGradients:
    """Notes one of the gradients, without looking at its numbers: on a GPU the host would wait for them.

    Args:
        parameters: the dense parameters.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._noted: tuple[Tensor, Any, int] | None = None

    def note(self) -> None:
        """Take note of them as they are."""
        found = next(((p, p.grad) for p in self._parameters if p.grad is not None), None)
        self._noted = None if found is None else (found[0], weakref.ref(found[1]), found[1]._version)

    @property
    def since_then(self) -> SinceThen | None:
        """What has become of them since :meth:`note`; None if there were none."""
        if self._noted is None:
            return None
        parameter, noted, version = self._noted
        if parameter.grad is None or parameter.grad is not noted():
            return SinceThen.ZEROED
        return SinceThen.SAME if parameter.grad._version == version else SinceThen.CHANGED
