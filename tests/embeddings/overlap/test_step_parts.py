"""Parts of a step: messages, lookups repeated by activation checkpointing in backward, and Adam on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_freescale.embeddings.optimizer import new_state, update_rows
from lightning_freescale.embeddings.overlap import id_exchange
from lightning_freescale.embeddings.overlap.batch_state import StepLookups
from lightning_freescale.embeddings.overlap.id_exchange import PartLayout, put, take
from tests.helpers.jagged import make_features


@pytest.mark.parametrize("few_ranks", [0, 32])
@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0]])
def test_what_is_put_is_what_is_taken(few_ranks: int, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_exchange, "_FEW_RANKS", few_ranks)
    starts, target = [1, 7, 12], torch.zeros(20, dtype=torch.int64)
    values = torch.arange(1, sum(counts) + 1)
    put(target, starts, counts, values)
    assert torch.equal(take(target, starts, counts), values)
    at = [start + number for start, count in zip(starts, counts) for number in range(count)]
    assert target.nonzero().flatten().tolist() == at and target[at].tolist() == values.tolist()


def test_rows_begin_behind_what_stands_before_them() -> None:
    layout = PartLayout(width=4, preambles=[0, 1, 17], rows=[2, 0, 3])
    assert layout.starts == [0, 2, 3, 8] and layout.length == 8
    assert layout.first_rows == [0, 3, 5], "17 bytes take two rows of 16"
    assert layout.sizes == [8, 4, 20]
    assert layout.words(1) == [1, 9, 13]


def test_rows_looked_up_again_may_be_changed_in_place_every_time() -> None:
    features, lookups = make_features(0), StepLookups()
    count = features.values().numel()
    noted = lookups.note(features)
    lookups.receive(torch.rand(count, 4), torch.arange(count), [count], asked_for=False)
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        rows = lookups.give_out(noted).detach().clone()
    for _ in range(2):
        again = lookups.made_before(features)
        assert again is not None and again.requires_grad and torch.equal(again, rows)
        again.mul_(2)


def test_gradients_are_not_waited_for_of_rows_submitted_in_vain() -> None:
    features, came = make_features(0), []
    count = features.values().numel()
    lookups = StepLookups(take=lambda again: came.append(lookups.all_gradients_came))
    for asked_for in (True, False):
        lookups.receive(torch.rand(count, 4), torch.arange(count), [count], asked_for=asked_for)
    noted = lookups.note(features)
    lookups.give_out(noted).sum().backward()
    assert came == [True]


def test_adam_of_all_rows_is_torchs_adamw() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, gradients = torch.randn(7, 4, generator=draw), torch.randn(9, 7, 4, generator=draw)
    expected = torch.nn.Parameter(weight.clone())
    optimizer, state = torch.optim.AdamW([expected], lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.2), new_state(weight)
    arguments = {"lr": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.2}
    for step, gradient in enumerate(gradients):
        expected.grad = gradient
        optimizer.step()
        update_rows(weight, state, torch.arange(7), gradient, arguments, step)
        torch.testing.assert_close(weight, expected.detach(), rtol=1e-6, atol=1e-7)
    for name, value in state.items():
        torch.testing.assert_close(value, optimizer.state[expected][name], rtol=1e-6, atol=1e-7)
