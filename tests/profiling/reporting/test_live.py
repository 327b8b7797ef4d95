"""The last steps in a few words."""

from __future__ import annotations

import pytest

from lightning_freescale.profiling.reporting.live import live_text

SHARES = {"data_wait": 0.05, "straggler_wait": 0.02, "transfer": 0.01, "wait": 0.0, "host_overhead": 0.03, "unexplained": 0.0}


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("data_wait", "31.4% (data wait 22.0%, slowest rank 3)"),
        ("straggler_wait", "31.4% (straggler wait 22.0%, slowest rank 3)"),
        ("wait", "31.4% (wait for peers 22.0%, slowest rank 3)"),
        ("host_overhead", "31.4% (host overhead 22.0%, slowest rank 3)"),
    ],
)
def test_the_largest_cause(cause: str, text: str) -> None:
    figures = {**SHARES, cause: 0.22, "fraction": 0.314, "slowest_rank": 3.0, "forward": 0.5, "hidden": 0.9}
    assert live_text({f"freescale/bubble/{name}": value for name, value in figures.items()}) == text


def test_one_rank() -> None:
    assert live_text({f"freescale/bubble/{name}": value for name, value in {**SHARES, "fraction": 0.1}.items()}) == (
        "10.0% (data wait 5.0%)"
    )
