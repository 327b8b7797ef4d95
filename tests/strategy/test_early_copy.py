"""Batches are copied to the device once, before training on them; tested on the CPU with simulated memory and streams."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_freescale import FreeScaleStrategy
from lightning_freescale._lightning.loops import leaves_transfer_alone
from lightning_freescale.balance import MicroBatches
from lightning_freescale.testing import run_distributed
from lightning_freescale.training.next_ids import EarlyCopy
from tests.helpers.fabric_loop import fabric_for, run_loop, set_up
from tests.helpers.jagged import copy_of
from tests.helpers.overlap_training import CountingModel, Run, assert_same, fit, my_loader
from tests.helpers.stream_clocks import Accesses, ClockStream, Watch, install

CPU, STEPS = torch.device("cpu"), 8


class Device:
    """A simulated device with memory for asynchronous copies."""

    def __init__(self) -> None:
        self.copied: Counter[int] = Counter()
        self._held: dict[int, Tensor] = {}
        plain = Tensor.to

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not kwargs.get("non_blocking") or tensor.data_ptr() in self._held:
                return plain(tensor, *args, **kwargs)
            self.copied[tensor.data_ptr()] += 1
            copy = tensor.clone()
            self._held[copy.data_ptr()] = copy
            return copy

        Tensor.to = to


def _fit(early: bool, parts: int) -> tuple[Run, list[int]]:
    torch.manual_seed(0)
    module, loader, device = CountingModel(), my_loader(parts * STEPS), None
    batches = loader.dataset.batches
    sources = [batch["features"].values().data_ptr() for batch in batches]
    if parts > 1:
        divided = [tuple(batches[first : first + parts]) for first in range(0, len(batches), parts)]
        loader.dataset.batches = [MicroBatches(batch, (1 / parts,) * parts) for batch in divided]
    if early:
        install(Accesses())
        device = Device()
        EarlyCopy.for_device = classmethod(lambda cls, *_: cls(CPU))
    run = fit(module, loader, strategy=FreeScaleStrategy())
    return run, [] if device is None else [device.copied[source] for source in sources]


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (2, 1), (1, 3)])
def test_a_batch_goes_to_the_device_once_and_gives_the_same_numbers(ranks: int, parts: int) -> None:
    expected, found = run_distributed(_fit, ranks, False, parts), run_distributed(_fit, ranks, True, parts)
    for (plain, _), (early, copied) in zip(expected, found):
        assert early.losses == plain.losses
        assert_same(early.weights, plain.weights, rtol=0, atol=0)
        assert early.statistics["mispredicted_lookups"] == 0 and early.statistics["predicted_lookups"] > 0
        # Lightning copies only the first; the simulation counts the move of its ids as a copy
        assert copied[0] == 0 and copied[parts:] == [1] * parts * (STEPS - 1)


def _by_fabric(early: bool) -> tuple[list[float], dict[str, Tensor], list[int]]:
    fabric = fabric_for()
    model, optimizer, loader = set_up(fabric, steps=STEPS)
    sources, device = [batch["features"].values().data_ptr() for batch in loader.dataset.batches], None
    if early:
        install(Accesses())
        device = Device()
        fabric.strategy.table_step.early_copy = EarlyCopy(CPU)
    losses = run_loop(fabric, model, optimizer, loader)
    statistics = fabric.strategy.engine.statistics()
    assert statistics["mispredicted_lookups"] == 0 and statistics["predicted_lookups"] > 0
    weights = fabric.strategy.get_module_state_dict(model._forward_module)
    return losses, weights, [] if device is None else [device.copied[source] for source in sources]


def test_so_it_is_by_fabric() -> None:
    for plain, early in zip(*(run_distributed(_by_fabric, 2, early) for early in (False, True))):
        assert_same(early[:2], plain[:2])
        assert early[2][1:] == [1] * (STEPS - 1)


def _watched(events_count: bool) -> tuple[set[str], set[str]]:
    accesses = Accesses()
    install(accesses)
    ClockStream.events_count = events_count
    batch = {"features": my_loader(1).dataset[0]["features"], "label": torch.ones(3), "name": "a"}
    Device()
    with Watch(accesses):
        copies = EarlyCopy(CPU)
        begun = copies.start(batch)
        assert copies.take(dict(batch)) is not begun, "another batch"
        taken = copies.take(batch)
        assert taken is begun and taken["name"] == "a" and taken["label"] is not batch["label"]
        assert copies.take(batch) is batch, "only once"
        taken["label"] * 2, copy_of(taken["features"])
    return accesses.unordered, accesses.unrecorded


def test_the_copy_is_ordered_before_its_use() -> None:
    assert run_distributed(_watched, 1, True) == [(set(), set())]
    unordered, _ = run_distributed(_watched, 1, False)[0]
    assert unordered


def _of_packed() -> bool:
    install(Accesses())
    batch = {"packed": pack_sequence([torch.ones(2)])}
    return EarlyCopy(CPU).start(batch) is batch


def test_what_cannot_be_recorded_on_a_stream_is_left_to_lightning() -> None:
    assert run_distributed(_of_packed, 1) == [True]


class Moves(L.LightningModule):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


class ChangesBefore(L.LightningDataModule):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class ChangesAfter(L.LightningModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("module", "data", "precision", "alone"),
    [
        (L.LightningModule, None, "32-true", True),
        (L.LightningModule, L.LightningDataModule, "bf16-mixed", True),
        (Moves, None, "32-true", False),
        (ChangesAfter, None, "32-true", False),
        (L.LightningModule, ChangesBefore, "32-true", False),
        (L.LightningModule, None, "64-true", False),
    ],
)
def test_hooks_around_the_copy_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, module: Any, data: Any, precision: Any, alone: bool
) -> None:
    plugin = L.Trainer(accelerator="cpu", precision=precision, logger=False, barebones=True).precision_plugin
    trainer: Any = SimpleNamespace(lightning_module=module(), datamodule=data and data(), precision_plugin=plugin)
    assert leaves_transfer_alone(trainer) is alone
    assert EarlyCopy.for_device(CPU, alone) is None, "there is no copy on CPU"
    monkeypatch.setattr(torch.cuda, "Stream", ClockStream)
    assert (EarlyCopy.for_device(torch.device("cuda", 0), alone) is not None) is alone
