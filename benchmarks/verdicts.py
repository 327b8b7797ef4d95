"""Accuracy of the profiler's verdict: runs with one planted cause each, and runs without any.

``python benchmarks/netlab.py --hosts 4 --rate 50mbit -- python benchmarks/verdicts.py`` trains under ``strategy="ddp"``, with
TorchRec's embedding exchange and with the overlapped exchange. ``--documents`` trains nothing, and judges the advice of reports
of made-up runs instead, whose options are on, or were rejected by the run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import planted
from harness import finish, finish_on_all_ranks, parser
from planted import Planted
from planted_documents import documents, repeated_advice

EVERYWHERE = {
    "data loading": Planted(loader=0.12),
    "imbalance of data": Planted(spread=1.0),
    "slow hardware": Planted(slow=1.4),
    "host overhead": Planted(host=0.08),
    "dense communication": Planted(dense_kib=512),
    # exchanges of few bytes take about 7 ms here, which is 3 % of a step of 240 ms
    "nothing": Planted(compute=1.0),
}
IN_ONE = {
    "exchange waited for": {"embedding exchange": Planted(ids=400)},
    # too little compute to hide it
    "exchange overlapped": {"embedding exchange": Planted(ids=400, compute=0.06)},
}


def main() -> None:
    """Run on all ranks; with ``--documents`` in a single process."""
    options = _options()
    if options.documents:
        finish(_judge_documents(), options)
        return
    leads, right, cases = int(os.environ["RANK"]) == 0, 0, 0
    for setting in options.settings:
        for cause, run in _causes(setting).items():
            document = planted.profile(setting, run, options.steps)
            cases += 1
            if leads:
                right += _is_right(setting, cause, run, document)
    figures = {"cases": float(cases), "right": float(right), "wrong": float(cases - right)}
    if leads:
        print(f"{right} of {cases} verdicts are correct")
    finish_on_all_ranks(figures, options)


def _judge_documents() -> dict[str, float]:
    """Return the numbers of documents, of wrong causes, and of verdicts that advise what is on or was rejected."""
    figures = {"documents": 0.0, "wrong": 0.0, "repeated": 0.0}
    for settings, cause, document in documents():
        verdict, repeated = document["verdict"], repeated_advice(document)
        figures["documents"] += 1
        figures["wrong"] += verdict["cause"] != cause
        figures["repeated"] += bool(repeated)
        print(f"{settings}, {cause}{f' REPEATED {repeated}' if repeated else ''}: {verdict['next']}")
    print(figures)
    return figures


def _causes(setting: str) -> dict[str, Planted]:
    return EVERYWHERE | IN_ONE.get(setting, {})


def _is_right(setting: str, cause: str, run: Planted, document: dict[str, Any]) -> bool:
    found = document["verdict"]
    right = found["cause"] == cause and (cause != "slow hardware" or "rank 1 takes" in found["why"].lower())
    print(f"\n{'right' if right else 'WRONG'}: {setting}, planted: {cause} {planted.as_row(run)}", flush=True)
    print(f"  Verdict: {found['verdict']}\n  Why:     {found['why']}\n  Next:    {found['next']}", flush=True)
    return right


def _options() -> Any:
    arguments = parser(__doc__)
    arguments.add_argument("--settings", nargs="+", choices=planted.SETTINGS, default=list(planted.SETTINGS[:3]))
    arguments.add_argument("--steps", type=int, default=24, help="counted steps of a fit (default: 24)")
    arguments.add_argument("--documents", action="store_true", help="judge the advice of made-up reports, and train nothing")
    planted.be_quiet()
    return arguments.parse_args()


if __name__ == "__main__":
    main()
