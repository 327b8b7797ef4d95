"""A dispatch mode that several threads may enter at once."""

from __future__ import annotations

from functools import wraps
from threading import RLock
from typing import Any

from torch._ops import OpOverloadPacket, _OpNamespace
from torch.utils._python_dispatch import TorchDispatchMode

_MAKES_ONE = RLock()


class ThreadMode(TorchDispatchMode):
    """Each thread enters one of its own. torch would take dynamo in and out around every operation, which ends the process now
    and then where two threads do it at once."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _make_each_operation_once(found_in: Any) -> None:
    """torch makes an operation's object when a mode first meets it, and C++ keeps a bare pointer to it. Where two threads meet
    it at once each makes one, the first is replaced and freed, and the pointer may be to that."""
    make = found_in.__getattr__

    @wraps(make)
    def make_once(self: Any, name: str) -> Any:
        with _MAKES_ONE:
            return self.__dict__[name] if name in self.__dict__ else make(self, name)

    found_in.__getattr__ = make_once


_make_each_operation_once(_OpNamespace)
_make_each_operation_once(OpOverloadPacket)
