"""A function of the user that tells which ids the model will look up in a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torchrec import KeyedJaggedTensor


class IdsFunction:
    """Calls the user's function and checks what it returns.

    Args:
        function: of a batch; returns a KeyedJaggedTensor, a list with one of each lookup, or one or the other for each path of
            a collection, in a mapping.
        name: of the function, for errors and warnings.
        overlapped: paths of the collections whose ids are asked for.
        plain: paths of the module's other collections; what is told of them is passed over.
    """

    def __init__(
        self, function: Callable[[Any], Any], name: str, overlapped: Collection[str], plain: Collection[str] = ()
    ) -> None:
        self.function, self.name = function, name
        self.overlapped, self.plain = list(overlapped), list(plain)

    def __call__(self, batch: Any) -> dict[str, list[KeyedJaggedTensor]]:
        """Return the ids in ``batch`` by the path of their collection, by lookup; the function may leave collections out.

        Raises:
            Exception: what the function raises, with a note that says who had called it.
            TypeError: it returns nothing of that.
            ValueError: it names no collection of the module, or returns none of their names for several collections.
        """
        try:
            told = self.function(batch)
        except Exception as error:
            # what add_note() does, which Python 3.10 has not
            note = f"raised by {self.name}, which strategy 'freescale' had asked for the ids of the next batch"
            error.__notes__ = [*getattr(error, "__notes__", ()), note]
            raise
        if isinstance(told, (KeyedJaggedTensor, list, tuple)):
            told = {self._only_path(): told}
        if not isinstance(told, Mapping):
            raise TypeError(
                f"{self.name} returned a {type(told).__name__}: return the KeyedJaggedTensor that the model will look up, a "
                "list of them if it makes several lookups, or a mapping from the paths of collections to that; the paths are "
                f"{self.overlapped}"
            )
        lookups = {path: self._checked(path, features) for path, features in told.items()}
        return {path: each for path, each in lookups.items() if path in self.overlapped}

    def _only_path(self) -> str:
        if len(self.overlapped) != 1:
            raise ValueError(
                f"{self.name} returned ids without a path, but {len(self.overlapped)} collections are overlapped: return a "
                f"mapping from the paths {self.overlapped}"
            )
        return self.overlapped[0]

    def _checked(self, path: Any, told: Any) -> list[KeyedJaggedTensor]:
        if path not in self.overlapped and path not in self.plain:
            raise ValueError(
                f"{self.name} returned ids for {path!r}, which is no embedding collection of the module: use the paths "
                f"{self.overlapped}"
            )
        lookups = list(told) if isinstance(told, (list, tuple)) else [told]
        for features in lookups:
            if not isinstance(features, KeyedJaggedTensor):
                raise TypeError(f"{self.name} returned a {type(features).__name__} for {path!r}: return a KeyedJaggedTensor")
        return lookups
