"""Merging table states into an optimizer's state dict, and taking them out again."""

from __future__ import annotations

import pytest
import torch

from lightning_freescale.checkpoint.unsharded import merge, split

LAYOUT = [["a", "table", "b"], ["other"]]
TABLES = {"table", "other"}


def _dense() -> dict:
    parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in "ab"}
    optimizer = torch.optim.Adagrad([{"params": list(parameters.values())}, {"params": [], "lr": 0.5}])
    for value, parameter in enumerate(parameters.values()):
        optimizer.state[parameter]["sum"].fill_(value)
    return optimizer.state_dict()


def test_merge_numbers_parameters_as_the_user_gave_them() -> None:
    full = merge(_dense(), LAYOUT, TABLES, {"table": {"sum": torch.full((3, 2), 7.0)}}, {"table": 4})
    assert [group["params"] for group in full["param_groups"]] == [[0, 1, 2], [3]]
    assert full["param_groups"][1]["lr"] == 0.5
    assert {index: float(state["sum"].flatten()[0]) for index, state in full["state"].items()} == {0: 0, 1: 7, 2: 1}
    assert full["state"][1]["step"] == 4.0


def test_split_is_the_inverse() -> None:
    dense = _dense()
    full = merge(dense, LAYOUT, TABLES, {"table": {"sum": torch.full((3, 2), 7.0)}}, {"table": 4})
    back, states, step = split(full, LAYOUT, TABLES)
    assert back["param_groups"] == dense["param_groups"]
    assert {i: float(s["sum"][0]) for i, s in back["state"].items()} == {0: 0.0, 1: 1.0}
    assert step == 4
    assert list(states) == ["table"]
    assert torch.equal(states["table"]["sum"], torch.full((3, 2), 7.0))


def test_other_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"groups of \[2, 0\] parameters, .* \[3, 1\]"):
        split(_dense(), LAYOUT, TABLES)
