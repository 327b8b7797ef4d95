"""The page shows the same figures as the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_freescale.simulator import Catalogue, Network, Quantity, Techniques, TrainingLoad, step_times
from lightning_freescale.simulator import network as network_room
from lightning_freescale.simulator.outlook import pairs_of_steps
from lightning_freescale.simulator.page import write_page
from lightning_freescale.simulator.quantity import assumed
from lightning_freescale.simulator.training_step import LADDER, expected_traffic
from tests.helpers.shown_page import plain

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 400).round()
RANKS = [3, 12, 40]
NET = Network(ranks_per_node=4)
LOAD = TrainingLoad.from_compute(
    4,
    LENGTHS,
    assumed(0.02, 0.01, 0.05, "s"),
    assumed(0.5, 0.2, 0.8),
    catalogue=Catalogue(100_000),
    constant=Quantity(1e-5, "measured", unit="s"),
    base=Quantity(1e-3, "measured", unit="s"),
    row_bytes=100_000,
)


@pytest.fixture
def page(open_page: Callable[..., Any], tmp_path: Path) -> Any:
    """Open the page of these lengths, and check that it logs nothing and requests nothing."""
    path = write_page(tmp_path / "page.html", LENGTHS, RANKS, LOAD, NET, "no data")
    shown, watch = open_page(path)
    yield shown
    assert (watch.console, watch.requests) == ([], [])


def _rows(page: Any) -> list[list[str]]:
    cells = "Array.from(document.querySelectorAll('tbody tr'), row => Array.from(row.cells, cell => cell.textContent))"
    return [[plain(cell) for cell in row] for row in page.evaluate(cells)]


def _expected(techniques: Techniques, load: TrainingLoad = LOAD, net: Network = NET) -> list[tuple[float, float]]:
    """Return the seconds of a step and of its compute for each number of ranks."""
    found = []
    for ranks in RANKS:
        pairs = pairs_of_steps(LENGTHS, ranks, LOAD, 4, 0, resample=False)
        sums = np.concatenate([pair[techniques.balance] for pair in pairs])
        compute = load.seconds(sums)
        walls = step_times(expected_traffic(compute, sums[:, :, 1], load, net, techniques), load, net, techniques)
        found.append((float(walls.mean()), float(compute.mean() + load.base.value)))
    return found


def _switch(page: Any, techniques: Techniques) -> None:
    """Set the switches in the order in which they are enabled."""
    wanted = {name: getattr(techniques, name) for name in Techniques.__dataclass_fields__}
    parts = wanted.pop("micro_batches")
    for name in ("balance", "sm_free", "overlap", "dedup", "split_backward", "two_level"):
        box = page.locator(f"#on-{name}")
        if box.is_enabled():
            box.set_checked(wanted[name])
    if page.locator("#micro_batches").is_enabled():
        page.locator("#micro_batches").select_option(str(parts))


def test_the_page_computes_what_the_package_does(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are equal for all techniques, within nodes and between nodes."""
    monkeypatch.setattr(network_room, "EXACT_RANKS", 0)  # the page uses the busiest link for any number of ranks
    plain_steps = _expected(Techniques())
    variants = [*LADDER.values(), Techniques(overlap=True, micro_batches=2, split_backward=True), Techniques(dedup=True)]
    for techniques in variants:
        _switch(page, techniques)
        for row, before, after in zip(_rows(page), plain_steps, _expected(techniques)):
            (first, useful), (step, compute) = before, after
            ratios = [step, 1 - compute / step, 1 - (step - compute) / (first - useful), first / step, first / useful]
            shown = [float(cell.replace("%", "").rstrip("xsm ")) for cell in row[3:]]
            digits = [step * 1e3, *(100 * ratio for ratio in ratios[1:3]), *ratios[3:]]
            assert shown == pytest.approx(digits, rel=5e-3, abs=0.06), (str(techniques), row)


@pytest.mark.slow
def test_sliders_change_what_is_assumed(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_room, "EXACT_RANKS", 0)
    before = _rows(page)
    _switch(page, Techniques(overlap=True))
    page.locator("#bandwidth").fill("20")
    page.locator("#exponent").fill("100")
    page.locator("#last_bucket").fill("400")  # more than all dense gradients
    stated = plain(page.locator("output[for=bandwidth]").inner_text())
    low, high = NET.bandwidth.low / 10, NET.bandwidth.high * 10
    slow = low * (high / low) ** (20 / 400)
    assert stated == f"{slow / 1e9:.3g} GB/s"
    net = replace(NET, bandwidth=replace(NET.bandwidth, value=slow, low=slow))
    load = replace(LOAD, catalogue=Catalogue(100_000, Quantity(0.5, "assumed")), last_bucket=Quantity(2.5e8, "assumed"))
    for row, (step, _) in zip(_rows(page), _expected(Techniques(overlap=True), load, net)):
        value, unit = row[3].split()
        assert float(value) / {"s": 1, "ms": 1e3}[unit] == pytest.approx(step, rel=5e-3)
    page.locator("#reset").click()
    _switch(page, Techniques(balance=True, overlap=True, dedup=True))
    assert _rows(page) == before
    # a technique is off without another one that it needs
    page.locator("#on-split_backward").check()
    page.locator("#micro_batches").select_option("4")
    page.locator("#on-overlap").uncheck()
    assert not page.locator("#on-split_backward").is_enabled() and not page.locator("#micro_batches").is_enabled()
    for row, (step, _) in zip(_rows(page)[1:], _expected(Techniques(balance=True, dedup=True))[1:]):
        assert float(row[3].split()[0]) == pytest.approx(step * 1e3, rel=5e-3)


@pytest.mark.slow
def test_the_page_fits_the_screen_and_strings_stay_text(open_page: Callable[..., Any], tmp_path: Path) -> None:
    path = write_page(tmp_path / "page.html", LENGTHS, RANKS, LOAD, NET, "lengths <b>of</b> no data")
    shown, watch = open_page(path, 390)
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390
    assert "lengths <b>of</b> no data" in shown.locator("header").inner_text() and shown.locator("header b").count() == 0
    assert "predicted" in shown.title().lower()
    said = shown.locator(".slider small").all_inner_texts()
    assert len(said) >= 12 and all(text.startswith(("measured", "assumed")) for text in said)
    assert (watch.console, watch.requests) == ([], [])
