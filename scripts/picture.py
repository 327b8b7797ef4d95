"""Draws docs/images from benchmarks/results: ``python scripts/picture.py``. Run it after a new result, like figures.py.

``step.svg`` shows one step of all ranks for the first and the last row of README's table. ``ladder.svg`` shows the mean step
for each technique. Both fit a narrow screen and follow the theme of the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
WIDTH, LEFT, RIGHT = 400, 60, 8
"""Units, which are about pixels on a narrow screen."""
LIGHT = {
    "compute": "#2166ac",
    "straggler wait": "#e08214",
    "transfer": "#b2182b",
    "data wait": "#8073ac",
    "host overhead": "#8c8c8c",
}
DARK = LIGHT | {"compute": "#4a8fd0", "transfer": "#e05263", "data wait": "#a99bd8"}
KINDS = {name.replace(" ", "_"): name for name in LIGHT} | {"data": "data wait", "host": "host overhead"}
"""The part of each kind of a report's interval, and of each figure of ladder.py."""
RUNGS = {
    "floor": "floor", "plain": "plain", "balance": "+ balance", "overlap": "+ overlap", "dedup": "+ dedup",
    "split": "+ split", "window": "+ window",
}  # fmt: skip


def main() -> None:
    """Write the pictures."""
    for name, text in pictures().items():
        (IMAGES / name).write_text(text)


def pictures() -> dict[str, str]:
    """Return the text of each picture by name."""
    real = _result("real_hstu_50mbit")
    return {"step.svg": _steps(real["figures"], real["steps"]), "ladder.svg": _ladder(_result("ladder_8")["figures"])}


def _result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def _steps(figures: dict[str, float], steps: dict[str, Any]) -> str:
    """Draw the ranks of both runs over one axis of time."""
    end = max(part[2] for ranks in steps.values() for rank in ranks for part in rank)
    drawn, top = [], 0
    for key, title in {"plain": "plain TorchRec + DDP", "dedup": "lightning-freescale"}.items():
        heading = f"{title}: bubble {100 * figures[f'{key}_bubble']:.1f} %"
        speed_up = f"{key}_speed_up_vs_plain"
        heading += f", {figures[speed_up]:.2f} times as fast" if speed_up in figures else ""
        drawn.append(_text(0, top + 14, heading, "title"))
        for number, rank in enumerate(steps[key]):
            drawn.append(_text(LEFT - 6, top + 31 + 14 * number, f"rank {number}", "end"))
            drawn += [
                _bar(top + 22 + 14 * number, 11, KINDS[kind], begin / end, (last - begin) / end) for kind, begin, last in rank
            ]
        top += 34 + 14 * len(steps[key])
    return _svg("One step of two ranks, with plain TorchRec and DDP and with lightning-freescale", drawn, top, end)


def _ladder(figures: dict[str, float]) -> str:
    """Draw the mean step for each technique, divided into parts."""
    end, drawn = max(figures[f"{key}_step_ms"] for key in RUNGS), []
    for number, (key, title) in enumerate(RUNGS.items()):
        drawn.append(_text(LEFT - 6, 18 + 24 * number, title, "end"))
        begin, step = 0.0, figures[f"{key}_step_ms"] / end
        for kind in list(KINDS)[: len(LIGHT)]:
            share = 1 - figures[f"{key}_bubble"] if kind == "compute" else figures[f"{key}_{kind}"]
            drawn.append(_bar(5 + 24 * number, 18, KINDS[kind], begin, share * step))
            begin += share * step
    return _svg("Parts of a mean step on 8 ranks, for each technique with those before it", drawn, 24 * len(RUNGS) + 8, end)


def _svg(title: str, drawn: Iterable[str], height: int, milliseconds: float) -> str:
    """Add the axis, the legend and the colours."""
    lines = []
    apart = 1000 if milliseconds > 2000 else 200
    for time in range(0, int(milliseconds) + 1, apart):
        x = LEFT + time / milliseconds * (WIDTH - LEFT - RIGHT)
        lines.append(f'<path d="M{x:.1f} 22V{height}"/>')
        lines.append(_text(x, height + 13, f"{time / 1000:g} s", "middle"))
    for number, name in enumerate(LIGHT):
        x, y = LEFT + 108 * (number % 3), height + 24 + 18 * (number // 3)
        lines.append(f'<rect class="{_class(name)}" x="{x}" y="{y}" width="11" height="11"/>{_text(x + 16, y + 10, name)}')
    box, name = f"0 0 {WIDTH} {height + 58}", escape(title)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="{WIDTH}" role="img" aria-label="{name}">'
    style = f"<style>{_TEXT}{_colours('#1f2328', '#d0d7de', LIGHT)}\n"
    dark = f"@media (prefers-color-scheme: dark) {{{_colours('#e6edf3', '#4a5160', DARK)}\n}}</style>"
    return "\n".join([head, style + dark, *lines, *drawn, "</svg>", ""])


_TEXT = """
text { font: 11px system-ui, sans-serif }
.title { font-size: 13px; font-weight: 600 }
.end { text-anchor: end }
.middle { text-anchor: middle }"""


def _colours(text: str, line: str, parts: dict[str, str]) -> str:
    of_parts = (f"\n.{_class(name)} {{ fill: {colour} }}" for name, colour in parts.items())
    return f"\ntext {{ fill: {text} }}\npath {{ stroke: {line} }}{''.join(of_parts)}"


def _class(name: str) -> str:
    return name.replace(" ", "-")


def _bar(y: float, height: int, part: str, begin: float, width: float) -> str:
    """Draw a part of a step; ``begin`` and ``width`` are shares of the axis."""
    space = WIDTH - LEFT - RIGHT
    at = f'x="{LEFT + begin * space:.1f}" y="{y}" width="{width * space:.1f}" height="{height}"'
    return f'<rect class="{_class(part)}" {at}/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y}">{escape(text)}</text>'


if __name__ == "__main__":
    main()
