"""``freescale balance``: assign the samples of every step to ranks, as in training, for other loops.

``freescale balance fit report.json`` fits a cost model to a report.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from lightning_freescale.balance import BalancedSampler, Budget, CostModel
from lightning_freescale.balance.calibration import fit_report
from lightning_freescale.balance.forecast import fewer_than_asked
from lightning_freescale.balance.simulate import KINDS, describe_lengths, read_lengths
from lightning_freescale.profiling.reporting.document import read


def run(command: str, arguments: list[str]) -> None:
    """Run the command; exit with status 2 and a message on errors."""
    name = arguments[0] if arguments and arguments[0] in _COMMANDS else ""
    description, add_arguments, run_command = _COMMANDS[name]
    parser = argparse.ArgumentParser(f"freescale {command} {name}".strip(), description=description, allow_abbrev=False)
    add_arguments(parser)
    options = parser.parse_args(arguments[bool(name) :])
    try:
        run_command(options)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{name or command}: {error}\n")


def _plan(options: argparse.Namespace) -> None:
    lengths, cost = read_lengths(options.lengths, options.column), CostModel()
    budgeted = options.batch_tokens is not None
    sampler = BalancedSampler(
        cost(lengths),
        Budget(options.batch_tokens, lengths) if budgeted else options.batch_size,
        num_replicas=options.ranks,
        rank=0,
        seed=options.seed,
        assignment_mode=options.assignment_mode or ("free" if budgeted else "fixed"),
        tokens=None if budgeted else lengths,  # as in the data module, so that the plan is that of training
    )
    print(f"{options.lengths.name}: {describe_lengths(lengths)}")
    print(f"predicted, not measured: {options.ranks} ranks; cost {cost.linear:g} L + {cost.quadratic:g} L²; tokens: L")
    if (fewer := fewer_than_asked(len(lengths), options.ranks, sampler.batch_size)) is not None:
        print(fewer)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        print(f"epoch {epoch}: {sampler.report()}")
    if options.plan is not None:
        _write_plan(sampler, options)


def _write_plan(sampler: BalancedSampler, options: argparse.Namespace) -> None:
    with options.plan.open("w") as file:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for step in range(len(sampler)):
                ranks = [samples.tolist() for samples in sampler.plan(epoch, step)]
                file.write(json.dumps({"epoch": epoch, "step": step, "ranks": ranks}) + "\n")
    print(f"wrote {options.plan}")


def _fit(options: argparse.Namespace) -> None:
    document = read(options.report)
    found = fit_report(document)
    fit, numbers = found.fit, asdict(found.fit.model)
    print(
        f"{options.report.name}: {found.steps} steps of {found.ranks} ranks; median error of the fit {fit.residual:.1%}; "
        f"a rank's step takes {fit.base:.3g} s besides its samples"
    )
    predicted = "" if found.predicted is None else f"{found.predicted:.3f} predicted in the run, "
    print(f"imbalance: {predicted}{found.by_fit:.3f} by this fit, {found.measured:.3f} measured")
    for rank, times in (document["imbalance"] or {"slow_ranks": {}})["slow_ranks"].items():
        print(f"rank {rank} takes {times:.2f} times as long as its samples explain")
    digits = {name: float(f"{value:.4g}") for name, value in numbers.items()}
    print(f"\nFreeScaleDataModule(..., cost={CostModel(**digits)})")
    inner = ", ".join(f"{name}: {value}" for name, value in digits.items())
    print(f"cost: {{class_path: lightning_freescale.balance.CostModel, init_args: {{{inner}}}}}")
    if options.json is not None:
        figures = {name: getattr(found, name) for name in ("steps", "ranks", "predicted", "by_fit", "measured")}
        context = {"base": fit.base, "residual": fit.residual, "slowness": fit.slowness.tolist(), **figures}
        options.json.write_text(json.dumps({"model": numbers, **context}, indent=2) + "\n")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    add = parser.add_argument
    add("--ranks", type=whole_number, required=True, metavar="N", help="number of ranks")
    add("--epochs", type=whole_number, default=1, metavar="N", help="number of epochs; default 1")
    add("--plan", type=Path, metavar="FILE", help="write one line of JSON per step: epoch, step, and the samples of each rank")


def add_data(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the arguments about the samples of a step."""
    add = parser.add_argument
    add("--lengths", type=Path, required=required, metavar="FILE", help="history lengths: " + KINDS)
    add("--column", metavar="NAME", help="column of a .csv file; each value is a sample, and its length is its number of rows")
    batch = parser.add_mutually_exclusive_group(required=required)
    batch.add_argument("--batch-size", type=whole_number, metavar="N", help="number of samples per rank and step")
    batch.add_argument("--batch-tokens", type=whole_number, metavar="N", help="maximum number of tokens per rank and step")
    mode_help = "equal counts (default), up to 1.25 times equal, or any counts (default with --batch-tokens)"
    add("--assignment-mode", choices=["fixed", "slack", "free"], help=mode_help)
    add("--seed", type=partial(whole_number, least=0), default=0, metavar="N", help="seed of the draw; default 0")


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("report", type=Path, help="report.json of a run with known history lengths")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the model and the figures as JSON")


def whole_number(text: str, least: int = 1) -> int:
    """Return the value of an option that is an integer of at least ``least``."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return int(text)


def numbers_of_ranks(text: str) -> list[int]:
    """Return the value of the option ``--ranks``."""
    return [whole_number(part.strip()) for part in text.split(",")]


_COMMANDS = {  # name: description, function that adds the arguments, function that runs the command
    "": (__doc__, _add_plan, _plan),
    "fit": ("Fit a cost model to the report.json of a BubbleProfiler.", _add_fit, _fit),
}
