"""``freescale simulate``: predict the gain of balancing, or of each technique, on more ranks than you have.

With history lengths alone, the command predicts what balancing gains. With ``--compute-ms``, or ``--report`` of a profiled run,
it predicts the gain of all techniques. A report replaces assumptions by figures that the run has measured. The other values are
assumptions with a range. An option replaces a value by a number or by LOW:NUMBER:HIGH.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from functools import partial
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
_OF_LOAD = ("batch_size", "rows", "row_bytes", "exponent", "dense_mb", "host_ms", "contention", "late_weights")
_CONVERTED = {  # options with a unit: field, unit, factor
    "row_bytes": ("row_bytes", "B", 1.0),
    "dense_mb": ("dense_bytes", "B", 1e6),
    "host_ms": ("host", "s", 1e-3),
}
_OF_BALANCE = ("batch_tokens", "assignment_mode", "dim", "layers", "heads", "padded", "micro_batches")
_OF_STEP = (*_OF_LOAD[1:], "attention", "network", "draws", "page")


def run(command: str, arguments: list[str]) -> None:
    """Run the command; exit with status 2 and a message on errors."""
    parser = _new_parser(command)
    options = parser.parse_args(arguments)
    alone = options.compute_ms is None and options.report is None
    try:
        measured = None if options.report is None else MeasuredRun(options.report)
        of_others = (_OF_STEP, "without --compute-ms and --report") if alone else (_OF_BALANCE, "with --compute-ms or --report")
        useless = dict.fromkeys(*of_others)
        useless |= {"attention": f"on {options.report}, which has lengths"} if measured is not None and measured.fits else {}
        useless |= dict.fromkeys(("column", "max_length"), "without --lengths") if options.lengths is None else {}
        for name, why in useless.items():
            if getattr(options, name) != parser.get_default(name):
                raise ValueError(f"--{name.replace('_', '-')} has no effect {why}. Remove it, or change the other option.")
        known = {} if measured is None else measured.known
        if options.batch_size is None and options.batch_tokens is None and "batch_size" not in known:
            raise ValueError("Pass --batch-size N, the number of histories per rank and step.")
        if alone:
            predict_balance(options, _lengths(options, None))
        else:
            _predict_steps(options, measured)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{command}: {error}\n")


def _lengths(options: argparse.Namespace, measured: MeasuredRun | None) -> Floats:
    if options.lengths is None:
        if measured is None or measured.lengths is None:
            what = "" if measured is None else f"{options.report} holds no history lengths. "
            raise ValueError(f"{what}Pass --lengths FILE, or --report of a run that knew its lengths.")
        return measured.lengths
    lengths = read_lengths(options.lengths, options.column)
    if options.max_length is not None:
        lengths = np.minimum(lengths, options.max_length)
    if measured is not None and measured.lengths is not None:
        theirs, ours = ((each.mean(), each.max()) for each in (lengths, measured.lengths))
        if not np.allclose(theirs, ours, rtol=0.05):  # held-out items shorten histories
            cut = (
                f"Pass --max-length {ours[1]:g} if the run cuts longer histories, or leave" if theirs[1] > ours[1] else "Leave"
            )
            raise ValueError(
                f"--lengths {options.lengths} has mean {theirs[0]:.4g} and maximum {theirs[1]:g}, but the run of "
                f"{options.report} had mean {ours[0]:.4g} and maximum {ours[1]:g}. {cut} out --lengths to use those of the run."
            )
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
        predicted = [{**asdict(each), "techniques": str(each.techniques)} for each in outlooks]
        document: dict[str, Any] = {"predicted_from": source, "predicted": predicted}
        document |= {"known": {name: asdict(each) for name, each in known.items()}}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


def _load(
    options: argparse.Namespace, lengths: Floats, measured: MeasuredRun | None
) -> tuple[TrainingLoad, dict[str, Quantity]]:
    """Return the load and its whole numbers. An option replaces a measured value, which replaces an assumption."""
    known = {"rows": Quantity(Catalogue.rows, "assumed"), "row_bytes": Quantity(TrainingLoad.row_bytes, "assumed", unit="B")}
    known |= {} if measured is None else measured.known
    for option in _OF_LOAD:
        if (given := getattr(options, option)) is not None:
            field, unit, factor = _CONVERTED.get(option, (option, "", 1.0))
            known[field] = _quantity(given, option, unit, factor)
    sizes = {name: known.pop(name) for name in ("batch_size", "rows", "row_bytes")}
    batch_size, rows, row_bytes = (int(each.value) for each in sizes.values())
    exponent = known.pop("exponent", None)
    catalogue = Catalogue(rows) if exponent is None else Catalogue(rows, exponent)
    if exponent is None and measured is not None and measured.collision_rate is not None:
        try:
            catalogue = catalogue.fitted(measured.collision_rate, measured.lookups)
        except ValueError as error:
            print(f"{options.report.name}: the popularity of items stays an assumption, because {error}")
    others: dict[str, Any] = {"row_bytes": row_bytes, "catalogue": catalogue, **known}
    if measured is not None and measured.fits:
        return TrainingLoad(batch_size, **{**measured.costs(), **others}), sizes
    attention, per_step = _quantity(options.attention, "attention"), batch_size
    if measured is None:
        compute = _quantity(options.compute_ms, "compute_ms", "s", 1e-3)
    else:
        compute, per_step = measured.compute, measured.batch_size or batch_size
    load = TrainingLoad.from_compute(per_step, lengths, compute, attention, **others)
    return replace(load, batch_size=batch_size), sizes


def _quantity(given: Any, option: str, unit: str = "", factor: float = 1.0) -> Quantity:
    low, value, high = (factor * number for number in (given if isinstance(given, tuple) else (given,) * 3))
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
    compute.add_argument("--compute-ms", type=_positive, metavar="MS", help="compute of a rank in the mean step")
    compute.add_argument("--report", type=Path, metavar="FILE", help="report.json of a run, whose figures replace assumptions")
    attention = "share of compute that grows as L², unless the report knows the lengths; default 0.3:0.5:0.7"
    add("--attention", type=_share, default=(0.3, 0.5, 0.7), metavar="SHARE", help=attention)
    add("--rows", type=whole_number, metavar="N", help="rows of all tables; default 10 million")
    add("--row-bytes", type=whole_number, metavar="N", help="bytes of an item's rows in all tables; default 1024")
    add("--exponent", type=_range, metavar="X", help="popularity falls as rank ** -X")
    add("--dense-mb", type=_range, metavar="MB", help="gradients that are reduced over all ranks")
    add("--host-ms", type=_range, metavar="MS", help="time of a step in which a rank neither computes nor exchanges")
    add("--contention", type=_range, metavar="SHARE", help="share by which an exchange on multiprocessors slows compute down")
    add("--late-weights", type=_range, metavar="SHARE", help="share of compute that a split backward postpones to the end")
    add("--network", type=Path, metavar="FILE", help="JSON: bandwidth, latency, peer_latency, node_bandwidth, ranks_per_node")
    add("--draws", type=int, default=8, metavar="N", help="draws of the assumptions for each two steps; default 8")
    add("--page", type=Path, metavar="FILE", help="interactive page to write, which works offline")
    return parser


def _range(text: str, kind: str = ">= 0", least: float = 0.0, most: float = math.inf) -> tuple[float, float, float]:
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        numbers *= 3
    if len(numbers) != 3 or not least <= numbers[0] <= numbers[1] <= numbers[2] <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number {kind} nor LOW:NUMBER:HIGH")
    return numbers[0], numbers[1], numbers[2]


_positive = partial(_range, kind="> 0", least=math.ulp(0.0))
_share = partial(_range, kind="from 0 to 1", most=1.0)
