"""``freescale simulate``: predict the gain of each technique on more ranks than you have.

The prediction needs history lengths and the compute of a mean step: ``--compute-ms``, or ``--report`` of a profiled run. All
other values are assumptions with a range. An option replaces an assumption by a number or by LOW:NUMBER:HIGH.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.calibration import fit_report
from lightning_freescale.balance.simulate import KINDS, describe_lengths, read_lengths
from lightning_freescale.command_line.balance import numbers_of_ranks, whole_number
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.simulator import Catalogue, Network, Quantity, TrainingLoad, simulate
from lightning_freescale.simulator.outlook import EXPLANATION, format_known, format_outlooks
from lightning_freescale.simulator.page import write_page
from lightning_freescale.simulator.quantity import quantities

_EXAMPLE = "freescale simulate --lengths lengths.txt --ranks 64,256,1024 --batch-size 32 --compute-ms 100:150:200"
_OF_LOAD = {  # option: field, unit, factor
    "dense_mb": ("dense_bytes", "B", 1e6),
    "host_ms": ("host", "s", 1e-3),
    "contention": ("contention", "", 1.0),
    "late_weights": ("late_weights", "", 1.0),
}


def run(command: str, arguments: list[str]) -> None:
    """Run the command; exit with status 2 and a message on errors."""
    parser = _new_parser(command)
    options = parser.parse_args(arguments)
    try:
        _simulate(options)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{command}: {error}\n")


def _simulate(options: argparse.Namespace) -> None:
    lengths = read_lengths(options.lengths, options.column)
    network = Network() if options.network is None else Network.read(options.network)
    load = _load(options, lengths)
    known = {**quantities(load), **quantities(network)}
    draw = {"steps": options.steps, "draws": options.draws, "seed": options.seed}
    outlooks = [outlook for ranks in options.ranks for outlook in simulate(lengths, ranks, load, network, **draw)]
    source = f"{options.batch_size} histories per rank and step, drawn with replacement from {options.lengths.name}"
    print(f"{options.lengths.name}: {describe_lengths(lengths)}")
    print(f"predicted, not measured: {options.steps} steps of {source}\n\n{format_outlooks(outlooks)}\n\n{EXPLANATION}\n")
    print(f"assumptions and measurements, with their ranges:\n{format_known(known)}")
    print(f"  rows: {load.catalogue.rows:,}; {load.row_bytes} bytes per item; {network.ranks_per_node} ranks per node")
    if options.page is not None:
        write_page(options.page, lengths, options.ranks, load, network, source, seed=options.seed)
    if options.json is not None:
        document: dict[str, Any] = {"predicted_from": source, "predicted": [each.as_dict() for each in outlooks]}
        document |= {"known": {name: asdict(each) for name, each in known.items()}}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


def _load(options: argparse.Namespace, lengths: NDArray[np.float64]) -> TrainingLoad:
    others: dict[str, Any] = {"row_bytes": options.row_bytes, "catalogue": _catalogue(options, float(lengths.mean()))}
    for option, (field, unit, factor) in _OF_LOAD.items():
        if (given := getattr(options, option)) is not None:
            others[field] = _quantity(given, option, unit, factor)
    if options.report is not None:
        return _measured_load(options, others)
    compute, attention = _quantity(options.compute_ms, "compute_ms", "s", 1e-3), _quantity(options.attention, "attention")
    return TrainingLoad.from_compute(options.batch_size, lengths, compute, attention, **others)


def _measured_load(options: argparse.Namespace, others: dict[str, Any]) -> TrainingLoad:
    """Return the load of a profiled run, with compute from a fit to its steps."""
    document = read(options.report)
    fit = fit_report(document).fit
    name, off = options.report.name, fit.residual

    def measured(seconds: float) -> Quantity:
        return Quantity(seconds, "measured", seconds * (1 - off), seconds * (1 + off), "s", name)

    costs = {each: measured(getattr(fit.model, each)) for each in ("linear", "quadratic", "constant")}
    summary = document["summary"]
    host = measured(summary["step_s"] * (summary["shares"]["host_overhead"] + summary["shares"]["data_wait"]))
    return TrainingLoad(options.batch_size, **{**costs, "base": measured(fit.base), "host": host, **others})


def _catalogue(options: argparse.Namespace, mean_length: float) -> Catalogue:
    known = Catalogue(options.rows)
    if options.exponent is not None:
        known = Catalogue(options.rows, _quantity(options.exponent, "exponent"))
    if options.collision_rate is None:
        return known
    rate, ranks = options.collision_rate
    measured = Quantity(rate, "measured", source=f"--collision-rate, at {ranks} ranks")
    return known.fitted(measured, ranks * options.batch_size * mean_length)


def _quantity(numbers: tuple[float, float, float], option: str, unit: str = "", factor: float = 1.0) -> Quantity:
    low, value, high = (factor * number for number in numbers)
    return Quantity(value, "assumed", low, high, unit, f"--{option.replace('_', '-')}")


def _new_parser(command: str) -> argparse.ArgumentParser:
    example = f"example: {_EXAMPLE}"
    parser = argparse.ArgumentParser(f"freescale {command}", description=__doc__, epilog=example, allow_abbrev=False)
    add = parser.add_argument
    add("--lengths", type=Path, required=True, metavar="FILE", help="history lengths: " + KINDS)
    add("--column", metavar="NAME", help="column of a .csv file: each value is a sample, and its number of rows is the length")
    add("--ranks", type=numbers_of_ranks, required=True, metavar="64,256,1024", help="numbers of ranks")
    add("--batch-size", type=whole_number, required=True, metavar="N", help="histories per rank and step")
    compute = parser.add_mutually_exclusive_group(required=True)
    compute.add_argument("--compute-ms", type=_range, metavar="MS", help="compute of a rank in the mean step")
    compute.add_argument("--report", type=Path, metavar="FILE", help="report.json of a run that measured the compute")
    add(
        "--attention",
        type=_range,
        default="0.3:0.5:0.7",
        metavar="SHARE",
        help="share of --compute-ms that grows as L²; default %(default)s",
    )
    add("--rows", type=whole_number, default=10_000_000, metavar="N", help="rows of all tables; default 10 million")
    add(
        "--row-bytes",
        type=whole_number,
        default=1024,
        metavar="N",
        help="bytes of an item's rows in all tables; default 1024",
    )
    popularity = parser.add_mutually_exclusive_group()
    popularity.add_argument("--exponent", type=_range, metavar="X", help="popularity falls as rank ** -X")
    popularity.add_argument(
        "--collision-rate", type=_rate, metavar="RATE@RANKS", help="collision rate that a run on RANKS ranks measured"
    )
    add("--dense-mb", type=_range, metavar="MB", help="gradients that are reduced over all ranks")
    add("--host-ms", type=_range, metavar="MS", help="time of a step in which a rank neither computes nor exchanges")
    add("--contention", type=_range, metavar="SHARE", help="share by which an exchange on multiprocessors slows compute down")
    add("--late-weights", type=_range, metavar="SHARE", help="share of compute that a split backward postpones to the end")
    add("--network", type=Path, metavar="FILE", help="JSON: bandwidth, latency, peer_latency, node_bandwidth, ranks_per_node")
    add(
        "--steps",
        type=partial(whole_number, least=2),
        default=20,
        metavar="N",
        help="number of steps to draw, at least 2; default 20",
    )
    add("--draws", type=int, default=8, metavar="N", help="draws of the assumptions for each two steps; default 8")
    add("--seed", type=int, default=0, metavar="N", help="seed of all draws; default 0")
    add("--page", type=Path, metavar="FILE", help="interactive page to write, which works offline")
    add("--json", type=Path, metavar="FILE", help="file for the figures")
    return parser


def _range(text: str) -> tuple[float, float, float]:
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        numbers *= 3
    if len(numbers) != 3 or not 0 <= numbers[0] <= numbers[1] <= numbers[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number >= 0 nor LOW:NUMBER:HIGH")
    return numbers[0], numbers[1], numbers[2]


def _rate(text: str) -> tuple[float, int]:
    rate, _, ranks = text.partition("@")
    try:
        return float(rate), whole_number(ranks)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate and a number of ranks, such as 0.2@8") from None
