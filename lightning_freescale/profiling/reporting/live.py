"""The last steps in a few words, for beside a progress bar."""

from __future__ import annotations

from collections.abc import Mapping

_CAUSES = ("data_wait", "straggler_wait", "transfer", "wait", "host_overhead", "unexplained")


def live_text(scalars: Mapping[str, float]) -> str:
    """Return the bubble, its largest cause and the slowest rank, from scalars by the names that loggers have for them."""
    figures = {name.removeprefix("freescale/bubble/"): value for name, value in scalars.items()}
    cause = max(_CAUSES, key=figures.__getitem__)
    named = "wait for peers" if cause == "wait" else cause.replace("_", " ")
    slowest = f", slowest rank {figures['slowest_rank']:.0f}" if "slowest_rank" in figures else ""
    return f"{figures['fraction']:.1%} ({named} {figures[cause]:.1%}{slowest})"
