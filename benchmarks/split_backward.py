"""Share of a step's compute that a split backward moves behind the rows' gradients, and the cost of the split.

``python benchmarks/split_backward.py`` runs the HSTU blocks of ``examples/hstu.py`` and attention blocks of SASRec. Batches are
histories with the lengths of ml-latest-small, in one process and thread, on random rows. Whole and split backward take turns.
*Share* is the part of forward and backward, split, that comes after the rows' gradient. *Step* is the split step over the whole
one. *Recording* is forward in the block over forward.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parent)]

import harness
import numpy as np
import overlap_workload
import torch
from hstu import HSTUBlock, Jagged
from torch import Tensor, nn

from lightning_freescale.data.interactions import read_interactions
from lightning_freescale.embeddings.overlap import WeightGradientsLast

BLOCKS, HEADS, LONGEST = 4, 4, 200


class Hstu(nn.Module):
    """HSTU blocks: jagged, with a relative bias of time."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HSTUBlock(dim, HEADS) for _ in range(BLOCKS))

    def forward(self, rows: Tensor, lengths: list[int]) -> Tensor:
        """Return the mean over the predictions of all positions."""
        jagged = Jagged(lengths, torch.arange(len(rows)) * 60)
        for block in self.blocks:
            rows = block(rows, jagged)
        return rows.square().mean()


class Sasrec(nn.Module):
    """SASRec blocks: padded, with softmax attention and a feed-forward layer of the same width."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"dim_feedforward": dim, "batch_first": True, "norm_first": True, "dropout": 0.0}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, HEADS, **options) for _ in range(BLOCKS))

    def forward(self, rows: Tensor, lengths: list[int]) -> Tensor:
        """Return the mean over the predictions of all positions."""
        padded = nn.utils.rnn.pad_sequence(list(rows.split(lengths)), batch_first=True)
        causal = nn.Transformer.generate_square_subsequent_mask(padded.shape[1])
        for block in self.blocks:
            padded = block(padded, src_mask=causal, is_causal=True)
        return padded.square().mean()


MODELS = {"hstu": Hstu, "sasrec": Sasrec}


def main() -> None:
    options = _options()
    figures: dict[str, float] = {}
    for name, make in MODELS.items():
        figures |= {f"{name}_{key}": value for key, value in _measured(make, options).items()}
    columns = ("forward_ms", "backward_ms", "rows_ms", "share", "step", "recording")
    print(f"{'':<10}" + "".join(f"{column:>14}" for column in columns))
    for name in MODELS:
        print(f"{name:<10}" + "".join(f"{figures[f'{name}_{column}']:14.3f}" for column in columns))
    harness.finish(figures, options)


def _measured(make: Callable[[int], nn.Module], options: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    module = make(options.dim)
    histories = read_interactions(
        overlap_workload.RATINGS, user="userId", item="movieId", time="timestamp", order="sort", ties="keep"
    )
    drawn = np.random.default_rng(0).choice(histories.lengths, (options.rounds + 1, options.batch)).clip(max=LONGEST)
    times: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for number, lengths in enumerate(drawn.tolist()):
        values = torch.randn(sum(lengths), options.dim)
        gradients = []
        for split in (False, True) if number % 2 else (True, False):
            took, given = _step(module, values, lengths, split)
            gradients.append(given)
            if number:
                times[split].append(took)
        assert all(torch.equal(one, other) for one, other in zip(*gradients)), "the numbers are others"
    (forward, _, backward), (recorded, rows, split) = (np.array(times[kind]).T for kind in (False, True))
    return {
        "forward_ms": 1e3 * float(np.median(forward)),
        "backward_ms": 1e3 * float(np.median(backward)),
        "rows_ms": 1e3 * float(np.median(rows)),
        "share": float(np.median((split - rows) / (recorded + split))),
        "step": float(np.median((recorded + split) / (forward + backward))),
        "recording": float(np.median(recorded / forward)),
    }


def _step(
    module: nn.Module, values: Tensor, lengths: list[int], split: bool
) -> tuple[tuple[float, float, float], list[Tensor]]:
    """Return seconds of forward, of backward up to the rows, and of the whole backward; and the gradients."""
    rows = values.clone().requires_grad_()
    came: list[float] = []
    rows.register_post_accumulate_grad_hook(lambda _: came.append(time.perf_counter()))
    module.zero_grad()
    began = time.perf_counter()
    with WeightGradientsLast() if split else nullcontext():
        loss = module(rows, lengths)
    forward = time.perf_counter()
    loss.backward()
    done = time.perf_counter()
    given = [tensor.grad for tensor in (rows, *module.parameters()) if tensor.grad is not None]
    return (forward - began, came[0] - forward, done - forward), given


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dim", type=int, default=128, help="width of rows and blocks (default: 128)")
    parser.add_argument("--batch", type=int, default=32, help="histories of a batch (default: 32)")
    parser.add_argument("--rounds", type=int, default=9, help="batches (default: 9)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return options


if __name__ == "__main__":
    main()
