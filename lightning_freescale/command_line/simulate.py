"""``freescale simulate``: predict the gain of each technique on more ranks than you have.

With history lengths alone, the command predicts what balancing gains. With ``--compute-ms``, or ``--report`` of a profiled run,
it predicts the gain of all techniques. A report replaces assumptions by figures that the run has measured. The other values are
assumptions with a range. An option replaces a value by a number or by LOW:NUMBER:HIGH.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lightning_freescale.balance.simulate import describe_lengths, read_lengths
from lightning_freescale.balance.validation import Floats
from lightning_freescale.command_line.balance import add_data, numbers_of_ranks, whole_number
from lightning_freescale.command_line.forecast import predict_balance
from lightning_freescale.command_line.measured_run import MeasuredRun
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
_ATTENTION = (0.3, 0.5, 0.7)
_OF_BALANCE = ("batch_tokens", "assignment_mode", "dim", "layers", "heads", "padded", "micro_batches")
_OF_STEP = (*_OF_LOAD, "attention", "rows", "row_bytes", "exponent", "collision_rate", "network", "draws", "page")


def run(command: str, arguments: list[str]) -> None:
    """Run the command; exit with status 2 and a message on errors."""
    parser = _new_parser(command)
    options = parser.parse_args(arguments)
    alone = options.compute_ms is None and options.report is None
    try:
        for name in _OF_STEP if alone else _OF_BALANCE:
            if getattr(options, name) != parser.get_default(name):
                which = "without --compute-ms and --report" if alone else "with --compute-ms or --report"
                raise ValueError(f"--{name.replace('_', '-')} has no effect {which}. Remove it, or change the other option.")
        if alone:
            predict_balance(options, _lengths(options, None))
        else:
            _predict_steps(options, None if options.report is None else MeasuredRun(options.report))
    except (OSError, ValueError) as error:
        parser.exit(2, f"{command}: {error}\n")


def _lengths(options: argparse.Namespace, measured: MeasuredRun | None) -> Floats:
    if options.lengths is None:
        if measured is None or measured.lengths is None:
            what = "" if measured is None else f"{options.report} holds no history lengths. "
            raise ValueError(f"{what}Pass --lengths FILE, or --report of a run that knew its lengths.")
        if options.max_length is not None:
            raise ValueError(f"--max-length {options.max_length} without --lengths: {options.report} has lengths as cut.")
        return measured.lengths
    lengths = read_lengths(options.lengths, options.column)
    if options.max_length is not None:
        lengths = np.minimum(lengths, options.max_length)
    if measured is not None:
        measured.check_lengths(options.lengths.name, lengths)
    return lengths


def _predict_steps(options: argparse.Namespace, measured: MeasuredRun | None) -> None:
    lengths = _lengths(options, measured)
    network = Network() if options.network is None else Network.read(options.network)
    load, sizes = _load(options, lengths, measured)
    known = {**sizes, **quantities(load), "ranks_per_node": Quantity(network.ranks_per_node, "assumed"), **quantities(network)}
    draw = {"steps": options.steps, "draws": options.draws, "seed": options.seed}
    outlooks = [outlook for ranks in options.ranks for outlook in simulate(lengths, ranks, load, network, **draw)]
    name = (options.lengths or options.report).name
    source = f"{load.batch_size} histories per rank and step, drawn with replacement from {name}"
    print(f"{name}: {describe_lengths(lengths)}, measured")
    print(f"predicted, not measured: {options.steps} steps of {source}\n\n{format_outlooks(outlooks)}\n\n{EXPLANATION}\n")
    print(f"assumptions and measurements, with their ranges:\n{format_known(known)}")
    if options.page is not None:
        write_page(options.page, lengths, options.ranks, load, network, source, seed=options.seed)
    if options.json is not None:
        document: dict[str, Any] = {"predicted_from": source, "predicted": [each.as_dict() for each in outlooks]}
        document |= {"known": {name: asdict(each) for name, each in known.items()}}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


def _load(
    options: argparse.Namespace, lengths: Floats, measured: MeasuredRun | None
) -> tuple[TrainingLoad, dict[str, Quantity]]:
    """Return the load and its whole numbers. An option replaces a measured value, which replaces an assumption."""
    sizes = _sizes(options, {} if measured is None else measured.sizes)
    batch_size, rows, row_bytes = (int(each.value) for each in sizes.values())
    catalogue, attention = _catalogue(options, rows, batch_size, lengths, measured), _quantity(options.attention, "attention")
    others: dict[str, Any] = {"row_bytes": row_bytes, "catalogue": catalogue}
    if measured is not None:
        if measured.fits and options.attention != _ATTENTION:
            raise ValueError(f"--attention has no effect: {options.report} has lengths, to which compute is fitted. Remove it.")
        others |= {**measured.costs(lengths, batch_size, attention), **measured.step()}
    for option, (field, unit, factor) in _OF_LOAD.items():
        if (given := getattr(options, option)) is not None:
            others[field] = _quantity(given, option, unit, factor)
    if measured is not None:
        return TrainingLoad(batch_size, **others), sizes
    compute = _quantity(options.compute_ms, "compute_ms", "s", 1e-3)
    return TrainingLoad.from_compute(batch_size, lengths, compute, attention, **others), sizes


def _sizes(options: argparse.Namespace, measured: Mapping[str, Quantity]) -> dict[str, Quantity]:
    found = {}
    for name, default in (("batch_size", 0), ("rows", Catalogue.rows), ("row_bytes", TrainingLoad.row_bytes)):
        given = getattr(options, name)
        if given is None and name in measured:
            found[name] = measured[name]
            continue
        if not (given or default):
            raise ValueError("Pass --batch-size N, the number of histories per rank and step.")
        source = "" if given is None else f"--{name.replace('_', '-')}"
        found[name] = Quantity(given or default, "assumed", unit="B" if name == "row_bytes" else "", source=source)
    return found


def _catalogue(
    options: argparse.Namespace, rows: int, batch_size: int, lengths: Floats, measured: MeasuredRun | None
) -> Catalogue:
    mean = float(lengths.mean())
    if options.exponent is not None:
        return Catalogue(rows, _quantity(options.exponent, "exponent"))
    if options.collision_rate is not None:
        rate, ranks = options.collision_rate
        found = Quantity(rate, "measured", source=f"--collision-rate, at {ranks} ranks")
        return Catalogue(rows).fitted(found, ranks * batch_size * mean)
    return Catalogue(rows) if measured is None else measured.catalogue(rows, mean)


def _quantity(numbers: tuple[float, float, float], option: str, unit: str = "", factor: float = 1.0) -> Quantity:
    low, value, high = (factor * number for number in numbers)
    return Quantity(value, "assumed", low, high, unit, f"--{option.replace('_', '-')}")


def _new_parser(command: str) -> argparse.ArgumentParser:
    example = f"example: {_EXAMPLE}"
    parser = argparse.ArgumentParser(f"freescale {command}", description=__doc__, epilog=example, allow_abbrev=False)
    add_data(parser, required=False)
    add = parser.add_argument
    add("--max-length", type=whole_number, metavar="N", help="maximum history length; longer histories are cut")
    add("--ranks", type=numbers_of_ranks, required=True, metavar="64,256,1024", help="numbers of ranks")
    add("--steps", type=whole_number, default=32, metavar="N", help="number of steps to draw; default 32")
    add("--json", type=Path, metavar="FILE", help="file for the figures")
    add = parser.add_argument_group("balancing alone").add_argument
    add("--dim", type=whole_number, metavar="N", help="width of the embeddings; default: a cost model for width 64")
    add("--layers", type=whole_number, metavar="N", help="number of blocks, with --dim; default 1")
    add("--heads", type=whole_number, metavar="N", help="number of attention heads, with --dim; default 1")
    add("--padded", action="store_true", help="the batches are padded to their longest sample; allows any counts")
    add("--micro-batches", type=whole_number, default=1, metavar="N", help="number of micro-batches, with --padded; default 1")
    group = parser.add_argument_group("all techniques")
    add, compute = group.add_argument, group.add_mutually_exclusive_group()
    compute.add_argument("--compute-ms", type=_range, metavar="MS", help="compute of a rank in the mean step")
    compute.add_argument("--report", type=Path, metavar="FILE", help="report.json of a run, whose figures replace assumptions")
    attention = "share of compute that grows as L², unless the report knows the lengths; default 0.3:0.5:0.7"
    add("--attention", type=_range, default=_ATTENTION, metavar="SHARE", help=attention)
    add("--rows", type=whole_number, metavar="N", help="rows of all tables; default 10 million")
    add("--row-bytes", type=whole_number, metavar="N", help="bytes of an item's rows in all tables; default 1024")
    popularity = group.add_mutually_exclusive_group()
    popularity.add_argument("--exponent", type=_range, metavar="X", help="popularity falls as rank ** -X")
    popularity.add_argument(
        "--collision-rate", type=_rate, metavar="RATE@RANKS", help="collision rate that a run on RANKS ranks measured"
    )
    add("--dense-mb", type=_range, metavar="MB", help="gradients that are reduced over all ranks")
    add("--host-ms", type=_range, metavar="MS", help="time of a step in which a rank neither computes nor exchanges")
    add("--contention", type=_range, metavar="SHARE", help="share by which an exchange on multiprocessors slows compute down")
    add("--late-weights", type=_range, metavar="SHARE", help="share of compute that a split backward postpones to the end")
    add("--network", type=Path, metavar="FILE", help="JSON: bandwidth, latency, peer_latency, node_bandwidth, ranks_per_node")
    add("--draws", type=int, default=8, metavar="N", help="draws of the assumptions for each two steps; default 8")
    add("--page", type=Path, metavar="FILE", help="interactive page to write, which works offline")
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
