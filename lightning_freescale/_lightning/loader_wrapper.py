"""A loader around another one that Lightning cannot tell from it."""

from __future__ import annotations

from typing import Any


class LoaderWrapper:
    """Looks like the loader it wraps; subclasses say how it iterates.

    Args:
        loader: the loader.
        state_of: whose ``state_dict`` and ``load_state_dict`` to show instead of the loader's, if the loader has them.
        own: attributes of the wrapper itself; all others are set on the loader.
    """

    def __init__(self, loader: Any, state_of: Any = None, **own: Any) -> None:
        self.__dict__.update(_loader=loader, **own)
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            # in the instance: a runtime-checkable protocol does not look at __getattr__
            shown = loader if state_of is None else state_of
            self.__dict__.update(state_dict=shown.state_dict, load_state_dict=shown.load_state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # copy and pickle ask before there is a loader
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)  # Lightning sets worker_init_fn and resets _iterator

    def __len__(self) -> int:
        return len(self._loader)
