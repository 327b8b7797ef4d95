"""The next batch on its way to the device, before the step of the batch before it."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchrec.streamable import Pipelineable

from lightning_freescale._lightning.loops import Movable, Trainer, leaves_transfer_alone


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
    def for_trainer(cls, trainer: Trainer) -> EarlyCopy | None:
        """Return one; None where there is no such device, or hooks of the user or the precision come before the copy."""
        device = trainer.strategy.root_device
        return cls(device) if device.type == "cuda" and leaves_transfer_alone(trainer) else None

    def start(self, batch: Any) -> Any:
        """Begin to copy a batch, and return its copy, which the current stream may use; the batch itself if it cannot be."""
        self._source = self._copy = None
        if not all(isinstance(each, (Tensor, Pipelineable)) for each in _movable(batch)):
            return batch  # nobody could tell when the memory of something else is free again
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
