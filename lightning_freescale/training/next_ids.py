"""The ids of the next batch of every overlapped collection, from the user's function or from the batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from lightning_freescale._lightning.loops import Movable, rank_zero_info, rank_zero_warn
from lightning_freescale._runtime.error_text import a
from lightning_freescale.embeddings.id_prediction import GivesUp, Probe
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.plain_embedding import EmbeddingIds

Ids = dict[str, list[KeyedJaggedTensor]]
"""The ids of each lookup, by the path of the collection."""


class IdsFunction:
    """Calls the user's function and checks its result.

    The function maps a batch to a KeyedJaggedTensor, a list with one per lookup, or a mapping from paths of collections to
    either. The ids of an ``nn.Embedding`` are a tensor instead. ``name`` is the function's name in messages. ``overlapped`` has
    the paths of the collections whose ids are needed, ``plain`` those of others, and ``embeddings`` those of an
    ``nn.Embedding``.
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
        """Return the ids of each lookup by path. The function may leave out collections.

        A wrong result is a TypeError or ValueError. Errors of the function get a note that names the caller.
        """
        try:
            returned = self.function(batch)
        except Exception as error:
            # the effect of add_note(), which Python 3.10 lacks
            note = f"raised by {self.name}, called by strategy 'freescale' for the ids of the next batch"
            error.__notes__ = [*getattr(error, "__notes__", ()), note]
            raise
        if isinstance(returned, (KeyedJaggedTensor, Tensor, list, tuple)):
            if len(self.overlapped) != 1:
                raise ValueError(
                    f"{self.name} returned ids without a path, but {len(self.overlapped)} collections are overlapped. Return a "
                    f"mapping from the paths {self.overlapped}."
                )
            returned = {self.overlapped[0]: returned}
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"{self.name} returned {a(type(returned))}. Return the KeyedJaggedTensor that the model will look up "
                "(the tensor for an nn.Embedding), or a list with one per lookup. For several collections, return a mapping "
                f"from the paths {self.overlapped}."
            )
        lookups = {path: self._checked(path, ids) for path, ids in returned.items()}
        return {path: each for path, each in lookups.items() if path in self.overlapped}

    def _checked(self, path: Any, ids: Any) -> list[KeyedJaggedTensor]:
        if path not in self.overlapped and path not in self.plain:
            raise ValueError(
                f"{self.name} returned ids for {path!r}, which is not an embedding collection of the module. Use the paths "
                f"{self.overlapped}."
            )
        return [self._as_features(path, each) for each in (ids if isinstance(ids, (list, tuple)) else [ids])]

    def _as_features(self, path: str, ids: Any) -> KeyedJaggedTensor:
        if path in self.embeddings and type(ids) is Tensor:
            return EmbeddingIds(path, ids)
        if path in self.embeddings or not isinstance(ids, KeyedJaggedTensor):
            wanted = "the tensor of ids" if path in self.embeddings else "a KeyedJaggedTensor"
            raise TypeError(f"{self.name} returned {a(type(ids))} for {path!r}. Return {wanted}.")
        return ids


class Lookahead:
    """Finds the ids of the next batch, by the user's function or in the places of the batch where earlier batches had them.

    The function is ``ids_of`` or, if that is None, the method ``embedding_ids`` of the module. ``strategy`` is the name of the
    strategy's class in messages.
    """

    def __init__(
        self,
        engine: OverlapEngine,
        module: Any,
        ids_of: Callable[[Any], Any] | None = None,
        strategy: str = "FreeScaleStrategy",
    ) -> None:
        self._device, self._strategy = engine.tables.device, strategy
        self._probes = {path: Probe() for path in engine.modules}
        self.given_up: set[str] = set()  # paths of collections for which any rank gave up in the step before
        self._returned: Ids = {}  # the user's ids of the next batch
        self.asked = False  # whether the next ids have been looked for; once, even if a closure repeats the step
        self._noticed: set[str] = set()
        self.function: IdsFunction | None = None
        name = f"{strategy}(ids_of={getattr(ids_of, '__qualname__', type(ids_of).__name__)})"
        if ids_of is None and callable(getattr(type(module), "embedding_ids", None)):  # not an attribute of an instance
            ids_of, name = module.embedding_ids, f"{type(module).__name__}.embedding_ids"
        if ids_of is not None:
            embeddings = [collection.path for collection, _ in engine.tables.modules if collection.embedding]
            self.function = IdsFunction(ids_of, name, engine.modules, engine.plain, embeddings)
        for path, reason in engine.plain.items():
            rank_zero_info(f"strategy 'freescale' does not overlap the exchange of {path!r} with compute. {reason}")

    def gives_up(self) -> dict[str, GivesUp]:
        return {path: probe.gives_up for path, probe in self._probes.items()}

    def gave_up(self) -> dict[str, bool]:
        return {path: probe.gave_up for path, probe in self._probes.items()}

    def ask(self, loaded: Any) -> Ids:
        """Return the ids of a batch from the user's function, as the batch leaves the loader."""
        if self.function is None or all(probe.gave_up for probe in self._probes.values()):
            return {}
        return self.function(loaded)

    def known_ids(self, returned: Ids, batch: Any) -> Ids:
        """Return the ids of the next batch: those that the user's function ``returned``, others from ``batch``."""
        self.asked, self._returned, found = True, returned, {}
        for path, probe in self._probes.items():
            if self.function is not None and path in returned:
                ids = probe.accept(returned[path], self.function.name)
            else:
                ids = probe.ids_of(batch)
            if ids is not None:
                found[path] = [features.to(self._device, non_blocking=True) for features in ids]
        return found

    def learn(self, lookups_made: Mapping[str, Sequence[Any]], batch: Any, comes_ahead: bool) -> None:
        """Learn from the lookups of the model in a step on ``batch``, on the device.

        ``comes_ahead`` tells whether batches are known before their step, so that the places of ids in them are of use.
        """
        for path, lookups in lookups_made.items():
            probe, features = self._probes[path], [lookup.features for lookup in lookups]
            if lookups[0].predicted is not None:
                probe.report(all(lookup.predicted for lookup in lookups), batch, features)
            elif not probe.known and comes_ahead and (self.function is None or (self.asked and path not in self._returned)):
                probe.learn(batch, features)
        for path in self.given_up:
            self._probes[path].give_up_with_others()

    def give_up(self, reason: str) -> None:
        for probe in self._probes.values():
            probe.give_up(reason)

    def give_notice(self) -> None:
        """Warn once, on rank 0, about collections whose ids cannot be predicted, after all ranks agreed on that."""
        silent = [path for path, probe in self._probes.items() if probe.gave_up and path not in self._noticed]
        if not silent:
            return
        self._noticed.update(silent)
        why = "; ".join(f"{path!r}: {self._probes[path].reason}" for path in silent)
        rank_zero_warn(
            f"The ids of the next batch cannot be predicted ({why}). The exchange of these embedding collections is no longer "
            "overlapped with compute. Put the KeyedJaggedTensor that the model looks up, or the tensor of ids of an "
            f"nn.Embedding, into the batch. Otherwise return the ids by {self._strategy}(ids_of=...), or by a method "
            f"embedding_ids(batch) of the {'LightningModule' if self._strategy == 'FreeScaleStrategy' else 'module'}."
        )


class EarlyCopy:
    """Copies the next batch to a CUDA device once its ids are needed, on a stream of its own; Lightning uses the copy later.

    The copy is asynchronous for pinned memory (``DataLoader(pin_memory=True)``). The computing stream waits for it before the
    step of the current batch, so it is hidden as far as the host runs ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._source: Any = None
        self._copy: Any = None

    @classmethod
    def for_device(cls, device: torch.device, left_alone: bool = True) -> EarlyCopy | None:
        """Return None unless ``device`` is a CUDA device and hooks leave batches unchanged on their way to it."""
        return cls(device) if left_alone and device.type == "cuda" else None

    def start(self, batch: Any) -> Any:
        """Start the copy of a batch and return it for use on the current stream. Return other batches unchanged."""
        self._source = self._copy = None
        if not all(isinstance(each, (Tensor, Pipelineable)) for each in _movable(batch)):
            return batch  # for other objects it is unknown when their memory is free again
        with torch.cuda.stream(self._stream):
            copy = apply_to_collection(batch, Movable, lambda each: each.to(self._device, non_blocking=True))
            copied = self._stream.record_event()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for each in _movable(copy):
            each.record_stream(current)
        self._source, self._copy = batch, copy
        return copy

    def take(self, batch: Any) -> Any:
        if self._source is not batch:
            return batch
        copy, self._source, self._copy = self._copy, None, None
        return copy


def _movable(batch: Any) -> list[Any]:
    found: list[Any] = []
    apply_to_collection(batch, Movable, found.append)
    return found
