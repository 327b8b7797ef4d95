"""Parts of a step: rows that activation checkpointing looks up again in backward, and rows that are fetched in vain."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_freescale.embeddings.overlap.batch_state import StepLookups
from tests.helpers.jagged import make_features


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
