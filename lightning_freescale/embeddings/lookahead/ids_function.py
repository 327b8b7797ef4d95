"""A function of the user that tells which ids the model will look up in a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.plain_embedding import EmbeddingIds


class IdsFunction:
    """Calls the user's function and checks what it returns.

    Args:
        function: of a batch; returns a KeyedJaggedTensor, a list with one of each lookup, or one or the other for each path of
            a collection, in a mapping. The ids of an ``nn.Embedding`` are a tensor instead.
        name: of the function, for errors and warnings.
        overlapped: paths of the collections whose ids are asked for.
        plain: paths of the module's other collections; what is told of them is passed over.
        embeddings: paths of those that are an ``nn.Embedding``.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        name: str,
        overlapped: Collection[str],
        plain: Collection[str] = (),
        embeddings: Collection[str] = (),
    ) -> None:
        self.function, self.name = function, name
        self.overlapped, self.plain, self.embeddings = list(overlapped), list(plain), frozenset(embeddings)

    def __call__(self, batch: Any) -> dict[str, list[KeyedJaggedTensor]]:
        """Return the ids in ``batch`` by the path of their collection, by lookup; the function may leave collections out.

        Raises:
            Exception: what the function raises, with a note that says who had called it.
            TypeError: it returns something else, or a tensor for a collection, or none for an ``nn.Embedding``.
            ValueError: it names no collection of the module, or returns none of their paths for several collections.
        """
        try:
            told = self.function(batch)
        except Exception as error:
            # what add_note() does, which Python 3.10 has not
            note = f"raised by {self.name}, which strategy 'freescale' had asked for the ids of the next batch"
            error.__notes__ = [*getattr(error, "__notes__", ()), note]
            raise
        if isinstance(told, (KeyedJaggedTensor, Tensor, list, tuple)):
            told = {self._only_path(): told}
        if not isinstance(told, Mapping):
            raise TypeError(
                f"{self.name} returned a {type(told).__name__}: return the KeyedJaggedTensor that the model will look up (of "
                "an nn.Embedding the tensor), a list of them if it makes several lookups, or a mapping from the paths of "
                f"collections to that; the paths are {self.overlapped}"
            )
        lookups = {path: self._checked(path, ids) for path, ids in told.items()}
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
        return [self._as_features(path, ids) for ids in (told if isinstance(told, (list, tuple)) else [told])]

    def _as_features(self, path: str, ids: Any) -> KeyedJaggedTensor:
        if path in self.embeddings and type(ids) is Tensor:
            return EmbeddingIds(path, ids)
        if path in self.embeddings or not isinstance(ids, KeyedJaggedTensor):
            wanted = "the tensor of ids" if path in self.embeddings else "a KeyedJaggedTensor"
            raise TypeError(f"{self.name} returned a {type(ids).__name__} for {path!r}: return {wanted}")
        return ids
