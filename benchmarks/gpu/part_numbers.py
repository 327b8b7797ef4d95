"""One rank on the GPU: strategy "freescale" under a Lightning Trainer against plain TorchRec, number by number.

Run it on a machine with a CUDA GPU: ``python benchmarks/gpu/part_numbers.py --out DIR``. Without a GPU it compares on the CPU
and lists what it skips. Cases train the same module on the same batches, with ``torch.use_deterministic_algorithms`` as far as
torch and FBGEMM support it:

- all optimizers against a loop over plain TorchRec and DDP written by hand: without dedup, and with TorchRec's own exchange
  (overlap="torchrec"), bitwise; with dedup, which sums in another order, within a tolerance;
- with validation between the steps, which must not change the result;
- from a checkpoint in the middle of an epoch, against the uninterrupted run, bitwise, optimizer states included;
- with precision bf16-mixed, against the loop under autocast;
- under torch's CUDA sanitizer in all threads, which must find no unordered accesses; a deliberate race shows that it works.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

sys.path += [str(Path(__file__).parents[depth]) for depth in range(3)]

import hour_report
import one_rank
import torch
from hour_report import Report, Skip
from one_rank_compare import judge

if TYPE_CHECKING:
    from one_rank_recommender import Run, Size

CLOSE = 1e-5
"""Relative; what sums in another order may come to in so many steps."""
UNEXPLAINED = 1e-4
"""Relative; more than rounding makes of Adam, which FBGEMM has on GPUs alone, so that CLOSE could not be tried on it.

torch's SparseAdam on the CPU, for 20 steps on the batches of a GPU, with the gradients of a row summed in another order: losses
differ by 5e-7, weights by 8e-7 in the mean. With one gradient of one row left out of each step's sum, by 3e-3.
"""
Alter = Callable[[str, "Run"], None]
NO_ADAM = "FBGEMM has no Adam on the CPU, so plain TorchRec has none"


@dataclass(frozen=True)
class Case:
    """One fit that is compared with the loop written by hand; ``tolerance`` 0 means bitwise."""

    name: str
    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    validate: bool = False
    precision: str = "32-true"


def cases() -> list[Case]:
    """Return all cases."""
    found = []
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam"):
        found += [
            Case(f"{optimizer}, no dedup", optimizer, {"dedup": False}),
            Case(f"{optimizer}, no overlap", optimizer, {"overlap": "torchrec"}),
            Case(f"{optimizer}, dedup", optimizer, {}, UNEXPLAINED if optimizer == "adam" else CLOSE),
        ]
    for optimizer in ("rowwise_adagrad", "adam"):
        found += [
            Case(f"{optimizer}, validation between", optimizer, {"dedup": False}, validate=True),
            Case(f"{optimizer}, no overlap, validation between", optimizer, {"overlap": "torchrec"}, validate=True),
        ]
    found += [
        Case("bf16-mixed, no dedup", "rowwise_adagrad", {"dedup": False}, precision="bf16-mixed"),
        Case("bf16-mixed, no overlap", "rowwise_adagrad", {"overlap": "torchrec"}, precision="bf16-mixed"),
    ]
    return found


def main(arguments: Sequence[str] | None = None, alter: Alter | None = None) -> None:
    options = hour_report.options(__doc__, arguments)
    report = Report("numbers", options.out)
    one_rank.demand(report)
    with one_rank.one_rank() as device, warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("default", message=".*deterministic")
        compare(report, device, options.quick, alter)
    for without in sorted({str(one.message).split(",")[0] for one in said if "deterministic" in str(one.message)}):
        report.skip("determinism", without)
    report.end()


def compare(report: Report, device: torch.device, quick: bool, alter: Alter | None = None) -> None:
    """Compare all cases with the loop written by hand.

    Args:
        report: the report that receives the rows.
        device: device to train on.
        quick: small sizes, few steps.
        alter: changes the result of a fit before the comparison, to test that the comparison finds it.
    """
    from one_rank_recommender import Size, train_plain

    size = Size(items=200_000, dim=64, samples=256, longest=100, steps=20) if device.type == "cuda" else Size(601, 8, 8, 12, 10)
    size = size if not quick else Size(min(size.items, 20_000), size.dim, min(size.samples, 64), size.longest, 6)
    torch.use_deterministic_algorithms(True, warn_only=True)
    trials = _Trials(device, size, alter or (lambda name, run: None))
    plain: dict[tuple[str, bool], Run] = {}
    for case in cases():
        with report.check(case.name):
            if case.optimizer == "adam" and device.type == "cpu":
                raise Skip(NO_ADAM)
            reference = case.optimizer, case.precision == "bf16-mixed"
            if reference not in plain:
                plain[reference] = train_plain(size, case.optimizer, trials.batches(), device, reference[1])
            judge(report, case.name, "plain TorchRec", trials.fit(case), plain[reference], case.tolerance)
    for optimizer in ("rowwise_adagrad", "adam"):  # the engine has an Adam of its own on the CPU
        with report.check(f"{optimizer}, resumed"):
            judge(report, f"{optimizer}, resumed", "the run that went on", *trials.resumed(optimizer), 0.0)
    sanitize(report, trials)
    _sum_up(report)


class _Trials:
    """Fits with the strategy."""

    def __init__(self, device: torch.device, size: Size, alter: Alter) -> None:
        self.device, self.size, self._alter = device, size, alter

    def batches(self) -> list[Any]:
        from one_rank_recommender import batches

        return batches(self.size, self.device)

    def fit(self, case: Case) -> Run:
        """Train one epoch; return the result without optimizer states, which have other names in plain TorchRec."""
        options: dict[str, Any] = {"val_check_interval": 2} if case.validate else {"limit_val_batches": 0}
        run = self._run(case, self.size.steps, **options)
        run.states = {}
        self._alter(case.name, run)
        return run

    def resumed(self, optimizer: str) -> tuple[Run, Run]:
        """Return the results of two fits, the second from the checkpoint of the first, and of one uninterrupted fit."""
        case, steps = Case(f"{optimizer}, resumed", optimizer), self.size.steps
        whole = self._run(case, steps, limit_val_batches=0)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "middle.ckpt"
            first = self._run(case, steps // 2, path, limit_val_batches=0)
            second = self._run(case, steps, ckpt_path=path, limit_val_batches=0)
        second.losses = first.losses + second.losses
        self._alter(case.name, second)
        return second, whole

    def _run(self, case: Case, steps: int, kept: Path | None = None, ckpt_path: Path | None = None, **options: Any) -> Run:
        from one_rank_recommender import Batches, Recommender, Run

        from lightning_freescale import FreeScaleStrategy

        torch.manual_seed(0)
        module = Recommender(self.size, case.optimizer)
        fitting = one_rank.trainer(
            self.device,
            strategy=FreeScaleStrategy(**case.options),
            max_steps=steps,
            precision=case.precision,
            deterministic="warn",
            **options,
        )
        validation = Batches(self.batches()[:2]) if case.validate else None
        fitting.fit(module, Batches(self.batches()), validation, ckpt_path=ckpt_path, weights_only=False)
        overlapped = fitting.strategy.overlap_report
        if case.options.get("overlap") != "torchrec" and (overlapped is None or overlapped.unpredicted_lookups >= 1):
            raise RuntimeError(f"{case.name}: no exchange was overlapped, so the comparison proves nothing")
        with TemporaryDirectory() as folder:
            path = kept or Path(folder) / "end.ckpt"
            fitting.save_checkpoint(path)
            state = torch.load(path, map_location="cpu", weights_only=False)
        weights = {name.removeprefix("net."): weight for name, weight in state["state_dict"].items()}
        states = {
            f"{index}.{name}": torch.as_tensor(value)
            for index, named in state["optimizer_states"][0]["state"].items()
            for name, value in named.items()
        }
        return Run([loss.item() for loss in module.losses], weights, states)


_WANTED: dict[str, bool | None] = {"a race made on purpose": True, "plain TorchRec": None}


def sanitize(report: Report, trials: _Trials) -> None:
    """Count unordered accesses of a deliberate race, of plain TorchRec and of the engine. Slow, so it runs last."""
    if trials.device.type != "cuda":
        report.skip("sanitizer", "no CUDA device, so there are no streams to order")
        return
    from one_rank_sanitizer import race

    trials.size = replace(trials.size, steps=6)  # every operator's stack is kept
    runs: dict[str, Callable[[], Any]] = {"a race made on purpose": lambda: race(trials.device)}
    for name, options in (("plain TorchRec", {"overlap": "torchrec"}), ("dedup", {}), ("no dedup", {"dedup": False})):
        runs[name] = lambda options=options: trials.fit(Case("sanitizer", "rowwise_adagrad", options))
    for name, run in runs.items():
        with report.check(f"sanitizer, {name}"):
            watch(report, name, run, wanted=_WANTED.get(name, False), overlapped="dedup" in name)


def watch(report: Report, name: str, run: Callable[[], Any], wanted: bool | None, overlapped: bool) -> None:
    """Add a row of the sanitizer's findings in a run, and print the first unordered accesses with their whole stacks.

    Args:
        report: the report that receives the row.
        name: name of the run.
        run: the run to watch.
        wanted: whether it has to find an unordered access; None if either is accepted.
        overlapped: whether the thread of the engine has to appear.
    """
    from one_rank_sanitizer import Accesses

    accesses = Accesses()  # a handler that knows other runs would confuse reused addresses with theirs
    with accesses.watched():
        run()
    background = sum(count for thread, count in accesses.operators.items() if thread.startswith("freescale"))
    count = accesses.unordered.total()
    seen = accesses.operators.total() > 0 and (background > 0 or not overlapped)
    ok = seen and wanted in (None, count > 0)
    report.row(
        what=f"sanitizer, {name}",
        operators=accesses.operators.total(),
        background=background,
        unordered=count,
        expected={True: "some", False: "none", None: "any"}[wanted],
        ok=ok,
    )
    for text in accesses.texts:
        print(f"sanitizer, {name}:", text, sep="\n", flush=True)
    if not ok:
        most = "; ".join(f"{count} x {what}" for what, count in accesses.unordered.most_common(8))
        said = most or "it does not see what it should: a blind check"
        report.fail(f"sanitizer, {name}", f"{accesses.within}\n{said}".strip())


def _sum_up(report: Report) -> None:
    rows = [row for row in report.found()["rows"] if "ok" in row]
    report.figure("cases", len(rows))
    report.figure("largest_loss_difference", max(row["losses"] or 0.0 for row in rows if "losses" in row))
    report.figure("unordered_accesses", sum(row["unordered"] for row in rows if row["expected"] == "none"))
    report.figure("cases_ok", sum(bool(row["ok"]) for row in rows))


if __name__ == "__main__":
    main()
