"""A dispatch mode that several threads may enter at once."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class ThreadMode(TorchDispatchMode):
    """Each thread enters one of its own. torch would take dynamo in and out around every operation, which ends the process now
    and then where two threads do it at once."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
