"""The ids of the next batch of every overlapped collection: the user's function, or the places where ids stood before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from lightning_freescale._lightning.loops import Movable, rank_zero_info, rank_zero_warn
from lightning_freescale.embeddings.id_prediction import GivesUp, Probe
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.plain_embedding import EmbeddingIds

Ids = dict[str, list[KeyedJaggedTensor]]
"""By the path of their collection, of each lookup."""


class IdsFunction:
    """Calls the user's function and checks what it returns.

    Args:
        function: of a batch; returns a KeyedJaggedTensor, a list with one of each lookup, or one or the other for each path of
            a collection, in a mapping. The ids of an ``nn.Embedding`` are a tensor instead.
        name: of the function, for errors and warnings.
        overlapped: paths of the collections whose ids are asked for.
        plain: paths of the module's other collections; ids returned for them are ignored.
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


class Lookahead:
    """Asks the user's function, and the places in the batch where ids stood before, for the ids of the batch that comes next.

    Args:
        engine: tells which collections are overlapped; it is not kept.
        module: its method ``embedding_ids`` returns ids, if there is no ``ids_of``.
        ids_of: the user's function that returns the ids in a batch.
        strategy: name of the strategy's class, for errors and warnings.

    Attributes:
        asked: whether the ids of the next batch have been asked for: once, also where a closure runs a step again.
        given_up: paths of the collections for which any rank gave up in the step before.
        function: returns the ids of a batch; None if neither the user nor the module has given one.
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
        self.given_up: set[str] = set()
        self._told: Ids = {}  # of what comes next
        self.asked = False
        self._noticed: set[str] = set()
        self.function: IdsFunction | None = None
        name = f"{strategy}(ids_of={getattr(ids_of, '__qualname__', type(ids_of).__name__)})"
        if ids_of is None and callable(getattr(type(module), "embedding_ids", None)):  # an attribute of that name is no method
            ids_of, name = module.embedding_ids, f"{type(module).__name__}.embedding_ids"
        if ids_of is not None:
            embeddings = [collection.path for collection, _ in engine.tables.modules if collection.embedding]
            self.function = IdsFunction(ids_of, name, engine.modules, engine.plain, embeddings)
        for path, reason in engine.plain.items():
            rank_zero_info(f"strategy 'freescale': the exchange of {path!r} is not overlapped with compute: {reason}")

    def gives_up(self) -> dict[str, GivesUp]:
        """Return whether this rank gives up after the next lookup, by collection."""
        return {path: probe.gives_up for path, probe in self._probes.items()}

    def gave_up(self) -> dict[str, bool]:
        """Return whether this rank has given up, by collection."""
        return {path: probe.gave_up for path, probe in self._probes.items()}

    def tell(self, loaded: Any) -> Ids:
        """Return the ids that the user's function finds in a batch that is to come, as it comes out of the loader."""
        if self.function is None or all(probe.gave_up for probe in self._probes.values()):
            return {}
        return self.function(loaded)

    def known_ids(self, told: Ids, batch: Any) -> Ids:
        """Return the ids of the batch that comes next, which the user has ``told`` or which stand in ``batch``."""
        self.asked, self._told, found = True, told, {}
        for path, probe in self._probes.items():
            if self.function is not None and path in told:
                ids = probe.accept(told[path], self.function.name)
            else:
                ids = probe.ids_of(batch)
            if ids is not None:
                found[path] = [features.to(self._device, non_blocking=True) for features in ids]
        return found

    def learn(self, lookups_made: Mapping[str, Sequence[Any]], batch: Any, comes_ahead: bool) -> None:
        """Learn from what the model has looked up in a step on ``batch``, on the device.

        Args:
            lookups_made: the lookups of each collection.
            batch: as the step got it.
            comes_ahead: whether batches are known before their step, so that it matters where ids stand in them.
        """
        for path, lookups in lookups_made.items():
            probe, features = self._probes[path], [lookup.features for lookup in lookups]
            if lookups[0].predicted is not None:
                probe.report(all(lookup.predicted for lookup in lookups), batch, features)
            elif not probe.known and comes_ahead and (self.function is None or (self.asked and path not in self._told)):
                probe.learn(batch, features)
        for path in self.given_up:
            self._probes[path].give_up_with_others()

    def give_up(self, reason: str) -> None:
        """Stop trying, for all collections."""
        for probe in self._probes.values():
            probe.give_up(reason)

    def give_notice(self) -> None:
        """Warn once of the collections whose ids cannot be known; on rank 0, by the modes that all ranks have agreed on."""
        silent = [path for path, probe in self._probes.items() if probe.gave_up and path not in self._noticed]
        if not silent:
            return
        self._noticed.update(silent)
        why = "; ".join(f"{path!r}: {self._probes[path].reason}" for path in silent)
        rank_zero_warn(
            f"the next batch's ids cannot be known ahead ({why}): the exchange of these embedding collections is not "
            "overlapped with compute from here on. Put the KeyedJaggedTensor into the batch as the model looks it up, or an "
            f"nn.Embedding's tensor of ids; or tell the ids by {self._strategy}(ids_of=...) or a method embedding_ids(batch) "
            f"of the {'LightningModule' if self._strategy == 'FreeScaleStrategy' else 'module'}"
        )


class EarlyCopy:
    """Copies the next batch as soon as its ids are needed, on a stream of its own; Lightning finds it on the device later.

    So the ids go to the device once. From pinned memory (``DataLoader(pin_memory=True)``) the host does not wait. The stream
    that computes does, before the step of the batch before: the copy is hidden as far as the host runs ahead of the device.

    Args:
        device: where to, a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._source: Any = None
        self._copy: Any = None

    @classmethod
    def for_device(cls, device: torch.device, left_alone: bool = True) -> EarlyCopy | None:
        """Return one; None if ``device`` is no CUDA device, or batches are not ``left_alone`` on their way to it."""
        return cls(device) if left_alone and device.type == "cuda" else None

    def start(self, batch: Any) -> Any:
        """Begin to copy a batch, and return its copy, which the current stream may use; the batch itself if it cannot be."""
        self._source = self._copy = None
        if not all(isinstance(each, (Tensor, Pipelineable)) for each in _movable(batch)):
            return batch  # of anything else it is unknown when its memory is free again
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
        """Return the copy of a batch if it was begun, else the batch itself."""
        if self._source is not batch:
            return batch
        copy, self._source, self._copy = self._copy, None, None
        return copy


def _movable(batch: Any) -> list[Any]:
    found: list[Any] = []
    apply_to_collection(batch, Movable, found.append)
    return found
