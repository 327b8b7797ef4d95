"""Predict the effect of balancing, and fit a cost model: ``python -m lightning_freescale.balance``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_freescale.balance.budget import Budget
from lightning_freescale.balance.calibration import fit_report
from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.forecast import counts_allowed, fewer_than_asked
from lightning_freescale.balance.simulate import (
    KINDS,
    Forecast,
    describe_lengths,
    forecast,
    format_table,
    new_figure,
    plot,
    read_lengths,
)

_EXAMPLE = "python -m lightning_freescale.balance simulate --lengths lengths.txt --ranks 8,64,256 --batch-size 32 --dim 256"


def main(arguments: Sequence[str] | None = None, program: str = "python -m lightning_freescale.balance") -> None:
    """Run the command line; exit with 2 and a message on an error. ``program`` is the name of the program in messages."""
    parser = argparse.ArgumentParser(program, description=__doc__)
    add_commands(parser.add_subparsers(dest="command", metavar="COMMAND"))
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return
    try:
        {"simulate": _simulate, "fit": _fit}[options.command](options)
    except (ImportError, OSError, ValueError) as error:
        parser.exit(2, f"{options.command}: {error}\n")


def _simulate(options: argparse.Namespace) -> None:
    cost, assign_options = _cost_model(options), _assign_options(options)
    figure = None if options.plot is None else new_figure(7.5, 4.5)  # before the work, to report a missing matplotlib
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
    mode = _describe_mode(options, assign_options)
    print(f"{options.lengths.name}: {describe_lengths(lengths)}")
    print(f"predicted, not measured: {predicted_from}; {mode}\n\n{format_table(rows)}\n")
    counts = counts_allowed(assign_options["assignment_mode"])
    _explain(rows, counts, options.padded)
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
    if figure is not None:
        plot(figure, rows, options.plot, f"predicted: {predicted_from.replace('; ', chr(10), 1)}; {mode}", counts)
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
    try:
        document = json.loads(options.report.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{options.report} is not valid JSON: {error}. Pass a complete report.json.") from error
    found = fit_report(document)
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


def add_commands(commands: Any) -> None:
    """Add the parsers of ``simulate`` and ``fit``."""
    simulate = commands.add_parser("simulate", help="predict imbalance, idle share and speed-up", epilog=f"example: {_EXAMPLE}")
    add = simulate.add_argument
    add("--lengths", type=Path, required=True, metavar="FILE", help="history lengths: " + KINDS)
    add("--column", metavar="NAME", help="column of a .csv file; each value is a sample, and its length is its number of rows")
    add("--ranks", type=_ranks, required=True, metavar="8,64,256", help="numbers of ranks")
    batch = simulate.add_mutually_exclusive_group(required=True)
    batch.add_argument("--batch-size", type=_whole, metavar="N", help="number of samples per rank and step")
    batch.add_argument("--batch-tokens", type=_whole, metavar="N", help="maximum number of tokens per rank and step")
    add("--dim", type=_whole, metavar="N", help="width of the embeddings; default: a cost model for width 64")
    add("--layers", type=_whole, metavar="N", help="number of blocks, with --dim; default 1")
    add("--heads", type=_whole, metavar="N", help="number of attention heads, with --dim; default 1")
    add("--max-length", type=_whole, metavar="N", help="maximum history length; longer histories are truncated")
    add("--padded", action="store_true", help="the batches are padded to their longest sample")
    add("--micro-batches", type=_whole, default=1, metavar="N", help="number of micro-batches, with --padded; default 1")
    mode_help = "equal counts (default), up to 1.25 times equal, or any counts (default with --batch-tokens and --padded)"
    add("--assignment-mode", choices=["fixed", "slack", "free"], help=mode_help)
    steps_help = "minimum number of steps; shorter epochs are drawn completely; default 32"
    add("--steps", type=_whole, default=32, metavar="N", help=steps_help)
    add("--seed", type=partial(_whole, least=0), default=0, metavar="N", help="seed of the draw; default 0")
    add("--plot", type=Path, metavar="FILE", help="draw imbalance over ranks; requires matplotlib")
    add("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    fit = commands.add_parser("fit", help="fit a cost model to the report.json of a BubbleProfiler")
    fit.add_argument("report", type=Path, help="report.json of a run with known history lengths")
    fit.add_argument("--json", type=Path, metavar="FILE", help="write the model and the figures as JSON")


def _whole(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return int(text)


def _ranks(text: str) -> list[int]:
    return [_whole(part.strip()) for part in text.split(",")]


if __name__ == "__main__":
    main()
