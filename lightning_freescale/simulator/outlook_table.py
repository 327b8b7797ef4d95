"""Outlooks as text, and what they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_freescale.simulator.outlook import SHARE, Outlook
from lightning_freescale.simulator.quantity import Quantity

LABELS = {
    "linear": "compute per item",
    "quadratic": "compute per item squared",
    "constant": "compute per history",
    "base": "compute besides histories",
    "exponent": "popularity exponent",
    "dense_bytes": "dense gradients",
    "host": "host work per step",
    "call": "a call of Python",
    "contention": "contention for multiprocessors",
    "late_weights": "weights' share of a split backward",
    "split_cost": "what a split costs",
    "bandwidth": "bandwidth between nodes",
    "latency": "latency of an exchange",
    "peer_latency": "latency per further rank",
    "node_bandwidth": "bandwidth within a node",
}
"""What quantities are called where they are shown."""
_HEAD = ("ranks", "technique", "step ms", "bubble", "of it gone", "speed-up", "limit")
_ROW = "{:>5}  {:<18}{:>24}{:>24}{:>24}{:>22}{:>22}"


def format_outlooks(outlooks: Sequence[Outlook]) -> str:
    """Return a table of the predicted figures, a row each, with their intervals."""
    lines = [_ROW.format(*_HEAD)]
    for number, each in enumerate(outlooks):
        first = number == 0 or outlooks[number - 1].ranks != each.ranks
        lines += [""] * (first and number > 0)
        gains = ("", "", _ratio(each.limit)) if each.name == "plain" else (_share(each.removed), _ratio(each.speed_up), "")
        ranks = each.ranks if first else ""
        row = _ROW.format(ranks, each.name, _interval(each.step, "{:.1f}", 1e3), _share(each.bubble), *gains)
        lines.append(row.rstrip())
    return "\n".join(lines)


def format_known(known: Mapping[str, Quantity]) -> str:
    """Return a line for each quantity: what it is, within which range, whether measured or assumed, and by whom."""
    width = max((len(LABELS[name]) for name in known), default=0)
    return "\n".join(f"  {LABELS[name]:<{width}}  {_readable(each)}" for name, each in known.items())


EXPLANATION = (
    f"All figures are predicted; in brackets {SHARE:.0%} of what lengths drawn anew, and assumptions anywhere in their\n"
    "ranges, lead to. Bubble: 1 - compute / wall time. Of it gone: of plain's bubble, as time. Limit: 1 / (1 - b) by plain's\n"
    "bubble b, which no technique can exceed."
)
"""What the columns mean."""


def _share(of: Quantity) -> str:
    return _interval(of, "{:.1%}")


def _ratio(of: Quantity) -> str:
    return _interval(of, "{:.2f}")


def _interval(of: Quantity, spec: str, factor: float = 1.0) -> str:
    value, low, high = (spec.format(factor * number) for number in (of.value, of.low, of.high))
    return value if low == high else f"{value} ({low} - {high})"


_BYTES = ((1e-9, "GB"), (1e-6, "MB"), (1e-3, "kB"), (1.0, "B"))
_UNITS: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns")),
    "B": _BYTES,
    "B/s": tuple((factor, f"{unit}/s") for factor, unit in _BYTES),
}


def _readable(of: Quantity) -> str:
    """In the largest unit of which there is at least one."""
    choices = _UNITS.get(of.unit, ((1.0, of.unit),))
    factor, unit = next((each for each in choices if of.value * each[0] >= 1), choices[-1])
    value, low, high = (f"{factor * number:.3g}" for number in (of.value, of.low, of.high))
    spread = f" ({low} - {high})" if of.low < of.high else ""
    return f"{value}{spread} {unit}".rstrip() + f", {of.word}" + (f": {of.source}" if of.source else "")
