"""Accuracy of the profiler's what-ifs: each is compared with a run without that cause.

``python benchmarks/what_if.py --ranks 4`` requires that ``netlab.py`` can run on this machine. It trains with a slow loader,
unequal samples, a slow hook and a slow link together. It then trains without each of them: batches that are ready at once, the
mean cost of the samples on each rank, no hook, a fast link. It trains under ``strategy="ddp"``, with TorchRec's and with the
overlapped exchange, and in micro-batches. Two more settings have a loader that takes nine tenths of a step, and a loader worker
that reads beside compute. ``predicted`` is the what-if of the run with the cause. ``measured`` is the time of its steps over
that of the run without the cause. Runs take turns, and figures are medians of ``--rounds``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from harness import finish, parser

WITHOUT = {
    "no data wait": {"loader": 0.0},
    "perfect balance": {"even": True},
    "no host overhead": {"host": 0.0},
}
BEHIND = ("perfect balance", "no data wait", "no host overhead")
LINK = "full overlap"
FAST = "10gbit"


def main() -> None:
    """Start both labs, or run one of their ranks."""
    options = _options()
    if options.rank_of is not None:
        _train(options)
        return
    with TemporaryDirectory() as folder:
        labs = {}
        for rate in (options.rate, FAST):
            file = Path(folder) / f"{rate}.json"
            _lab(rate, file, options)
            labs[rate] = json.loads(file.read_text())
    figures = _figures(labs[options.rate], labs[FAST])
    finish(figures, options)


def _lab(rate: str, file: Path, options: Any) -> None:
    here = Path(__file__).resolve()
    flags = ["--rank-of", str(file), "--rate", options.rate, "--steps", options.steps, "--rounds", options.rounds]
    flags += ["--settings", *options.settings] if options.settings else []
    command = [sys.executable, here.with_name("netlab.py"), "--hosts", options.ranks, "--rate", rate, "--timeout", 1800]
    subprocess.run([str(each) for each in (*command, "--", sys.executable, here, *flags)], check=True)


def _train(options: Any) -> None:
    """Train all runs of this link on all ranks; rank 0 writes the content of their reports."""
    import planted

    planted.be_quiet()
    slow_link = os.environ["NETLAB_RATE"] == options.rate
    lines = []
    for number in range(options.rounds):
        for setting in options.settings or planted.SETTINGS:
            usual = planted.Planted(spread=0.5, loader=0.06, host=0.04, ids=160, dense_kib=128)
            starved = planted.Planted(compute=0.1, loader=0.9)
            behind = planted.Planted(spread=0.5, loader=0.4, host=0.04, workers=1)
            runs = {"as it is": usual}
            if slow_link:
                runs |= {name: replace(usual, **without) for name, without in WITHOUT.items()}
                runs |= {"behind a worker": behind} | {
                    f"behind a worker: {name}": replace(behind, **WITHOUT[name]) for name in BEHIND
                }
                runs |= {"starved": starved, "starved: no data wait": replace(starved, loader=0.0)}
            for name, run in runs.items():
                document = planted.profile(setting, run, options.steps // 2 if "starved" in name else options.steps)
                if document:
                    lines.append({"setting": setting, "run": name, "round": number, **_as_line(document)})
                    print(f"{setting}: {name}: {lines[-1]['step_s'] * 1e3:.1f} ms", flush=True)
    if int(os.environ["RANK"]) == 0:
        options.rank_of.write_text(json.dumps(lines))


def _as_line(document: dict[str, Any]) -> dict[str, Any]:
    cases = {case["name"]: case["speed_up"] for case in document["what_if"]}
    summary = document["summary"]
    return {"step_s": summary["step_s"], "bubble": summary["bubble"], "shares": summary["shares"], "what_if": cases}


def _figures(slow: list[dict[str, Any]], fast: list[dict[str, Any]]) -> dict[str, float]:
    def step(lines: list[dict[str, Any]], setting: str, run: str) -> list[float]:
        return [each["step_s"] for each in lines if (each["setting"], each["run"]) == (setting, run)]

    def predicted(setting: str, run: str, case: str) -> list[float]:
        return [each["what_if"][case] for each in slow if (each["setting"], each["run"]) == (setting, run)]

    figures: dict[str, float] = {}
    print(f"{'':<30}{'without':<34}{'step ms':>9}{'predicted':>11}{'spread':>15}{'measured':>10}{'spread':>15}{'off':>8}")
    for setting in dict.fromkeys(each["setting"] for each in slow):
        rows = [("as it is", case, case, slow) for case in WITHOUT] + [("as it is", LINK, "as it is", fast)]
        rows += [("behind a worker", case, f"behind a worker: {case}", slow) for case in BEHIND]
        rows.append(("starved", "no data wait", "starved: no data wait", slow))
        for run, case, other, without in rows:
            foreseen = predicted(setting, run, case)
            ratios = np.array(step(slow, setting, run)) / step(without, setting, other)
            off = float(np.median(foreseen) / np.median(ratios) - 1)
            name = case if run == "as it is" else f"{case}, {run}"
            print(
                f"{setting:<30}{name:<34}{1e3 * np.median(step(slow, setting, run)):9.1f}"
                f"{np.median(foreseen):11.3f}{_range(foreseen):>15}{np.median(ratios):10.3f}{_range(ratios):>15}{off:8.1%}"
            )
            key = f"{setting} {name}".replace(",", "").replace(" ", "_").replace("-", "_")
            figures |= {f"{key}_predicted": float(np.median(foreseen)), f"{key}_measured": float(np.median(ratios))}
            figures[f"{key}_off"] = abs(off)
    off = [value for key, value in figures.items() if key.endswith("_off")]
    figures |= {
        "combinations": float(len(off)),
        "within_5_percent": float(sum(each <= 0.05 for each in off)),
        "worst": max(off),
    }
    print(f"{figures['within_5_percent']:.0f} of {len(off)} within 5 %; the largest difference is {max(off):.1%}")
    return figures


def _range(values: Any) -> str:
    return f"{min(values):.3f} - {max(values):.3f}"


def _options() -> Any:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--ranks", type=int, default=4)
    add("--rate", default="50mbit", help="rate of the slow link (default: 50mbit)")
    add("--settings", nargs="+", help="default: all")
    add("--steps", type=int, default=24, help="counted steps of a fit; half of them if only the loader is slow (default: 24)")
    add("--rounds", type=int, default=2)
    add("--rank-of", type=Path, metavar="FILE", help="run one rank, and write its reports to FILE")
    return arguments.parse_args()


if __name__ == "__main__":
    main()
