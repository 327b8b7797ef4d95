"""``freescale balance``: plan the samples of every step and rank, for training loops that load their own data.

``freescale balance simulate`` predicts the gain of balancing. ``freescale balance fit report.json`` fits a cost model to a
report. Both are also commands of ``python -m lightning_freescale.balance``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lightning_freescale.balance import BalancedSampler, Budget, CostModel
from lightning_freescale.balance.__main__ import add_commands, main
from lightning_freescale.balance.forecast import fewer_than_asked
from lightning_freescale.balance.simulate import KINDS, describe_lengths, read_lengths


def run(command: str, arguments: list[str]) -> None:
    """Run the command; exit with status 2 and a message on errors."""
    if arguments[:1] in (["simulate"], ["fit"]):
        main(arguments, f"freescale {command}")
        return
    parser = _new_parser(command)
    options = parser.parse_args(arguments)
    try:
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
    except (OSError, ValueError) as error:
        parser.exit(2, f"{command}: {error}\n")


def _new_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"freescale {command}", description=__doc__)
    add = parser.add_argument
    add("--lengths", type=Path, required=True, metavar="FILE", help="history lengths: " + KINDS)
    add("--column", metavar="NAME", help="column of a .csv file: each value is a sample, and its number of rows is the length")
    add("--ranks", type=int, required=True)
    batch = parser.add_mutually_exclusive_group(required=True)
    batch.add_argument("--batch-size", type=int, metavar="N", help="samples per rank and step")
    batch.add_argument("--batch-tokens", type=float, metavar="N", help="most tokens per rank and step")
    add(
        "--assignment-mode",
        choices=["fixed", "slack", "free"],
        help="numbers of samples on the ranks: equal (default), within limits, or any (default with --batch-tokens)",
    )
    add("--seed", type=int, default=0, help="seed of the order (default: 0)")
    add("--epochs", type=int, default=1, help="number of epochs (default: 1)")
    add(
        "--plan",
        type=Path,
        metavar="FILE",
        help="write one line of JSON per step: epoch, step, and the samples of each rank",
    )
    add_commands(parser.add_subparsers(metavar="simulate | fit"))
    return parser


def _write_plan(sampler: BalancedSampler, options: argparse.Namespace) -> None:
    with options.plan.open("w") as file:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for step in range(len(sampler)):
                ranks = [samples.tolist() for samples in sampler.plan(epoch, step)]
                file.write(json.dumps({"epoch": epoch, "step": step, "ranks": ranks}) + "\n")
    print(f"wrote {options.plan}")
