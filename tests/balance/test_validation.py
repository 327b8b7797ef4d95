"""The checks of numbers that users pass: they name argument, value, index and shape."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_freescale.balance.validation import is_non_negative, non_negative


def test_numbers_that_fit_become_float64() -> None:
    checked = non_negative("costs", [0, 1, 2.5], 3)
    assert checked.dtype == np.float64 and checked.tolist() == [0.0, 1.0, 2.5]
    assert non_negative("costs", []).shape == (0,)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_single_number(value: float) -> None:
    assert not is_non_negative(value) and is_non_negative(0) and is_non_negative(0.5)
    assert is_non_negative(np.array([0.0, value])).tolist() == [True, False]


@pytest.mark.parametrize(
    ("values", "size", "message"),
    [
        ([1.0, -2.0], None, r"^lengths\[1\] is -2\.0: every entry must be a finite number >= 0 \(1 are not\)$"),
        ([float("nan"), -2.0, 1.0], 3, r"^lengths\[0\] is nan: .* \(2 are not\)$"),
        ([[1.0]], None, r"^lengths has shape \(1, 1\): pass one number per sample, shape \[samples\]$"),
        ([1.0], 2, r"^lengths has shape \(1,\): pass one number per sample, shape \[2\]$"),
        ([1.7e308, 1.7e308], None, r"^lengths: numbers up to 1\.7e\+308 overflow when they are summed\. Use a larger unit$"),
    ],
)
def test_numbers_that_do_not_fit(values: list, size: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        non_negative("lengths", values, size)


def test_errors_count_from_the_first_sample_of_a_streams_part() -> None:
    with pytest.raises(ValueError, match=r"^cost_fn\(sample\)\[41\] is -2\.0: "):
        non_negative("cost_fn(sample)", [1.0, -2.0], first=40)
