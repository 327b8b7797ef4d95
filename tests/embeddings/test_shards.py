"""What FBGEMM's kernels update with."""

from __future__ import annotations

import pytest

from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.shards import prepare_kernel
from tests.helpers.fake_adam import FakeAdam


def test_adam_is_given_its_options_and_count_before_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    adam = FakeAdam(monkeypatch)
    for step in (0, 1, 2, 7):
        options = {"lr": 0.5**step, "eps": 0.1 * step, "beta1": 0.5, "beta2": 0.25 * step, "weight_decay": 0.125 * step}
        for _ in range(2):
            adam.look_up()  # of validation, which FBGEMM counts as well
        prepare_kernel(adam.module, {"table": UpdateSettings(step, options)})
        adam.look_up()
        assert adam.step == step + 1
        assert adam.options == options


def test_options_that_are_left_out_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    adam = FakeAdam(monkeypatch)
    prepare_kernel(adam.module, {"table": UpdateSettings(0, {"lr": 0.25, "eps": 0.5})})
    prepare_kernel(adam.module, {"table": UpdateSettings(1)})
    adam.look_up()
    assert (adam.options["lr"], adam.options["eps"], adam.step) == (0.25, 0.5, 2)


def test_tables_of_one_kernel_have_one_count_and_are_frozen_together(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeAdam(monkeypatch).module
    with pytest.raises(ValueError, match=r"\['a', 'b'\] have seen \[3, 1\] updates, .* parameter groups of their own"):
        prepare_kernel(module, {"a": UpdateSettings(3), "b": UpdateSettings(1)})
    with pytest.raises(ValueError, match=r"\['b'\] are frozen .* and \['a'\] are not"):
        prepare_kernel(module, {"a": UpdateSettings(3), "b": UpdateSettings(3, frozen=True)})
    prepare_kernel(module, {"a": UpdateSettings(3, frozen=True), "b": UpdateSettings(3, frozen=True)})
    assert not any(parameter.requires_grad for parameter in module.parameters())
