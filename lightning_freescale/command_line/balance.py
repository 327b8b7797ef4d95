"""``freescale balance``: assign the samples of every step to ranks, as in training, for other loops.

``freescale balance simulate`` predicts the gain of balancing. ``freescale balance fit report.json`` fits a cost model to a
report.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_freescale.balance import BalancedSampler, Budget, CostModel
from lightning_freescale.balance.calibration import fit_report
from lightning_freescale.balance.forecast import counts_allowed, fewer_than_asked
from lightning_freescale.balance.simulate import KINDS, Forecast, describe_lengths, forecast, format_table, read_lengths
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


def _simulate(options: argparse.Namespace) -> None:
    cost, assign_options = _cost_model(options), _assign_options(options)
    lengths = read_lengths(options.lengths, options.column)
    if options.max_length is not None:
        lengths = np.minimum(lengths, options.max_length)
    draw = {"steps": options.steps, "seed": options.seed}
    batch_size = options.batch_size if options.batch_tokens is None else Budget(options.batch_tokens, lengths)
    setting = {**draw, **assign_options, "micro_batches": options.micro_batches}
    rows = [forecast(lengths, ranks, batch_size, cost, **setting) for ranks in options.ranks]
    per_rank = f"{options.batch_size} samples" if options.batch_tokens is None else f"at most {options.batch_tokens} tokens"
    predicted_from = (
        f"at least {options.steps} steps of {per_rank} per rank, drawn from {options.lengths.name}; "
        f"cost {cost.linear:g} L + {cost.quadratic:g} L²"
    )
    print(f"{options.lengths.name}: {describe_lengths(lengths)}")
    print(f"predicted, not measured: {predicted_from}; {_describe_mode(options, assign_options)}\n\n{format_table(rows)}\n")
    _explain(rows, counts_allowed(assign_options["assignment_mode"]), options.padded)
    for row in rows:
        sentences = [row.advice or fewer_than_asked(len(lengths), row.ranks, batch_size)]
        if row.padding is not None:
            drawn, balanced = f"{row.padding_unbalanced:.0%}", f"{row.padding:.0%}"
            sentences.insert(0, f"{drawn} of the computed tokens are padding as drawn, {balanced} when balanced.")
        if row.fill is not None:
            used = f"{row.fill:.1%} of the allowed tokens"
            sentences.insert(0, f"The steps have up to {row.samples_per_step} samples and use {used}.")
        if any(sentences):
            print(f"\n{row.ranks} ranks: {' '.join(filter(None, sentences))}")
    if options.json is not None:
        figures = [{**asdict(row), "speedup": row.speedup} for row in rows]
        context = {"predicted_from": predicted_from, "samples": len(lengths), **draw, **assign_options}
        options.json.write_text(json.dumps({**context, "predicted": figures}, indent=2) + "\n")


def _describe_mode(options: argparse.Namespace, assign_options: dict[str, Any]) -> str:
    mode = ", ".join(f"{name} {value}" for name, value in assign_options.items() if name != "padded")
    if options.padded:
        mode += f", padded to the longest sample of a {'rank' if options.micro_batches == 1 else 'micro-batch'}"
    if options.micro_batches > 1:
        mode += f", {options.micro_batches} micro-batches"
    return mode


def _explain(rows: Sequence[Forecast], counts: str, padded: bool) -> None:
    """Print the explanation of the columns."""
    if any(row.zigzag is not None for row in rows):
        print("zig-zag: FreeScale's assignment (arXiv 2604.24073), at equal counts; balanced: the assignment of this package")
    if padded:
        print("imbalance: load of the slowest rank with padding / mean load without padding")
        print("idle: share of the ranks' time for padding and for waiting for the slowest rank")
    else:
        print("idle: share of the compute time that the ranks wait for the slowest rank, mean over ranks")
    print(f"lower bound: imbalance that no assignment of these steps {counts} can beat")
    print("dominated: share of steps in which one sample costs more than a rank's fair share")
    print("speed-up: imbalance as drawn / balanced, compute only; planning: measured on this machine")


def _fit(options: argparse.Namespace) -> None:
    found = fit_report(read(options.report))
    fit, numbers = found.fit, asdict(found.fit.model)
    print(
        f"{options.report.name}: {found.steps} steps of {found.ranks} ranks; median error of the fit {fit.residual:.1%}; "
        f"a rank's step takes {fit.base:.3g} s besides its samples"
    )
    predicted = "" if found.predicted is None else f"{found.predicted:.3f} predicted in the run, "
    print(f"imbalance: {predicted}{found.by_fit:.3f} by this fit, {found.measured:.3f} measured")
    for rank, times in fit.slow_ranks().items():
        print(f"rank {rank} takes {times:.2f} times as long as its samples explain")
    digits = {name: float(f"{value:.4g}") for name, value in numbers.items()}
    print(f"\nFreeScaleDataModule(..., cost={CostModel(**digits)})")
    inner = ", ".join(f"{name}: {value}" for name, value in digits.items())
    print(f"cost: {{class_path: lightning_freescale.balance.CostModel, init_args: {{{inner}}}}}")
    if options.json is not None:
        figures = {name: getattr(found, name) for name in ("steps", "ranks", "predicted", "by_fit", "measured")}
        context = {"base": fit.base, "residual": fit.residual, "slowness": fit.slowness.tolist(), **figures}
        options.json.write_text(json.dumps({"model": numbers, **context}, indent=2) + "\n")


def _cost_model(options: argparse.Namespace) -> CostModel:
    sizes = {name: value for name in ("layers", "heads") if (value := getattr(options, name)) is not None}
    if options.dim is not None:
        return CostModel.from_config(options.dim, **sizes)
    if sizes:
        raise ValueError(f"--{' and --'.join(sizes)} without --dim: pass the width of the embeddings as --dim too.")
    return CostModel()


def _assign_options(options: argparse.Namespace) -> dict[str, Any]:
    free = options.batch_tokens is not None or options.padded
    mode = options.assignment_mode or ("free" if free else "fixed")
    if options.padded and options.batch_tokens is not None:
        raise ValueError("--padded does not support --batch-tokens. Pass --batch-size instead.")
    if options.micro_batches > 1 and not options.padded:
        raise ValueError(
            f"--micro-batches {options.micro_batches} without --padded has no effect, because micro-batches only change "
            "padding. Pass --padded too, or leave it out."
        )
    return {"assignment_mode": mode, **({"padded": True} if options.padded else {})}


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_data(parser)
    add = parser.add_argument
    add("--ranks", type=whole_number, required=True, metavar="N", help="number of ranks")
    add("--epochs", type=whole_number, default=1, metavar="N", help="number of epochs; default 1")
    add("--plan", type=Path, metavar="FILE", help="write one line of JSON per step: epoch, step, and the samples of each rank")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    _add_data(parser)
    add = parser.add_argument
    add("--ranks", type=numbers_of_ranks, required=True, metavar="8,64,256", help="numbers of ranks")
    add("--dim", type=whole_number, metavar="N", help="width of the embeddings; default: a cost model for width 64")
    add("--layers", type=whole_number, metavar="N", help="number of blocks, with --dim; default 1")
    add("--heads", type=whole_number, metavar="N", help="number of attention heads, with --dim; default 1")
    add("--max-length", type=whole_number, metavar="N", help="maximum history length; longer histories are truncated")
    add("--padded", action="store_true", help="the batches are padded to their longest sample; allows any counts")
    add("--micro-batches", type=whole_number, default=1, metavar="N", help="number of micro-batches, with --padded; default 1")
    steps_help = "minimum number of steps; shorter epochs are drawn completely; default 32"
    add("--steps", type=whole_number, default=32, metavar="N", help=steps_help)
    add("--json", type=Path, metavar="FILE", help="write the figures as JSON")


def _add_data(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about the samples of a step."""
    add = parser.add_argument
    add("--lengths", type=Path, required=True, metavar="FILE", help="history lengths: " + KINDS)
    add("--column", metavar="NAME", help="column of a .csv file; each value is a sample, and its length is its number of rows")
    batch = parser.add_mutually_exclusive_group(required=True)
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
    "simulate": ("Predict imbalance, idle share and speed-up.", _add_simulate, _simulate),
    "fit": ("Fit a cost model to the report.json of a BubbleProfiler.", _add_fit, _fit),
}
