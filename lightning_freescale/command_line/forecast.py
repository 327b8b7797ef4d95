"""The prediction of ``freescale simulate`` for balancing alone, from history lengths."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_freescale.balance import Budget, CostModel
from lightning_freescale.balance.forecast import counts_allowed, fewer_than_asked
from lightning_freescale.balance.simulate import Forecast, describe_lengths, forecast, format_table
from lightning_freescale.balance.validation import Floats


def predict_balance(options: argparse.Namespace, lengths: Floats) -> None:
    """Print what balancing gains on each number of ranks, and write it to the file ``--json``."""
    cost, assign_options = _cost_model(options), _assign_options(options)
    draw = {"steps": options.steps, "seed": options.seed}
    batch_size = options.batch_size if options.batch_tokens is None else Budget(options.batch_tokens, lengths)
    setting = {**draw, **assign_options, "micro_batches": options.micro_batches}
    rows = [forecast(lengths, ranks, batch_size, cost, **setting) for ranks in options.ranks]
    per_rank = f"{options.batch_size} samples" if options.batch_tokens is None else f"at most {options.batch_tokens} tokens"
    predicted_from = (
        f"at least {options.steps} steps of {per_rank} per rank, drawn from {options.lengths.name}; "
        f"cost {cost.linear:g} L + {cost.quadratic:g} L²"
    )
    mode, parts = assign_options["assignment_mode"], options.micro_batches
    padded = f", padded to the longest sample of a {'rank' if parts == 1 else 'micro-batch'}" if options.padded else ""
    described = f"assignment_mode {mode}{padded}{f', {parts} micro-batches' if parts > 1 else ''}"
    print(f"{options.lengths.name}: {describe_lengths(lengths)}")
    print(f"predicted, not measured: {predicted_from}; {described}\n\n{format_table(rows)}\n")
    _explain(rows, counts_allowed(mode), options.padded)
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


def _explain(rows: Sequence[Forecast], counts: str, padded: bool) -> None:
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
