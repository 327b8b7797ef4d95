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


def test_parameters_are_numbered_as_the_user_gave_them_and_back() -> None:
    dense = _dense()
    full = merge(dense, LAYOUT, TABLES, {"table": {"sum": torch.full((3, 2), 7.0)}}, {"table": 4})
    assert [group["params"] for group in full["param_groups"]] == [[0, 1, 2], [3]] and full["param_groups"][1]["lr"] == 0.5
    assert {index: float(state["sum"].flatten()[0]) for index, state in full["state"].items()} == {0: 0, 1: 7, 2: 1}
    back, states, step = split(full, LAYOUT, TABLES)
    assert back["param_groups"] == dense["param_groups"] and step == 4 and list(states) == ["table"]
    assert {i: float(s["sum"][0]) for i, s in back["state"].items()} == {0: 0.0, 1: 1.0}
    with pytest.raises(ValueError, match=r"\[2, 0\].*\[3, 1\]"):
        split(dense, LAYOUT, TABLES)
