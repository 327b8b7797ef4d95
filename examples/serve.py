"""Serving of the weights of a checkpoint with the plain module in a single process.

``python examples/serve.py --checkpoint sasrec.ckpt`` serves a model of ``examples/sasrec.py``. Without a checkpoint, the script
first trains a small model on two ranks. ``freescale consolidate`` extracts the weights from the checkpoint into a file. Reading
this file needs neither Lightning's Trainer nor the strategy.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from sasrec import RATINGS, SASRec
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_freescale.data import read_interactions


class Server:
    """Recommends items with weights in memory.

    Args:
        weights: file of ``freescale consolidate``, with whole tables.
        heads: number of attention heads per layer, which cannot be read from the weights.
    """

    def __init__(self, weights: Path, heads: int = 1) -> None:
        state = torch.load(weights, map_location="cpu", weights_only=True, mmap=True)
        rows, dim = state["items.weight"].shape
        layers = len({name.split(".")[2] for name in state if name.startswith("layers.layers.")})
        self.model = SASRec(rows - 1, len(state["positions.weight"]), dim, layers, heads)
        self.model.load_state_dict(state)  # raises for missing and unexpected weights
        self.model.eval()
        self.model.catalogue = self.model.items.weight.detach()  # an ordinary table with all rows

    @torch.inference_mode()
    def recommend(self, histories: list[Tensor], k: int) -> tuple[Tensor, Tensor]:
        """Return the scores and ids of the ``k`` best unseen items, shape ``[histories, k]`` each, in descending order."""
        longest = self.model.positions.num_embeddings
        recent = pad_sequence([history[-longest:] + 1 for history in histories], batch_first=True)  # 0 is the padding
        rated = self.model.rate(recent)
        for row, history in zip(rated, histories):
            row[history + 1] = float("-inf")
        scores, items = rated.topk(k)
        return scores, items - 1


def consolidate(checkpoint: Path) -> Path:
    """Run ``freescale consolidate``, and return the path of the weights, next to the checkpoint."""
    weights = checkpoint.with_suffix(".pt")
    command = [sys.executable, "-m", "lightning_freescale", "consolidate", checkpoint, weights, "--force"]
    subprocess.run(command, check=True)
    return weights


def main() -> None:
    """Train if there is no checkpoint, consolidate, load, and recommend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="checkpoint of examples/sasrec.py (default: train a small model)")
    parser.add_argument("--users", type=int, default=3, help="number of users to serve")
    parser.add_argument("-k", type=int, default=5, help="number of recommended items per user")
    options = parser.parse_args()
    checkpoint = options.checkpoint or Path("served.ckpt")
    if options.checkpoint is None:
        script = Path(__file__).with_name("sasrec.py")
        command = [sys.executable, script, "--epochs", "1", "--max-length", "50", "--out", checkpoint]
        subprocess.run(command, check=True)
    server = Server(consolidate(checkpoint))
    columns = {"user": "userId", "item": "movieId", "time": "timestamp", "order": "sort", "ties": "keep"}
    histories = read_interactions(RATINGS, **columns)
    ends = histories.offsets
    asked = [torch.from_numpy(histories.items[ends[user] : ends[user + 1]]) for user in range(options.users)]
    scores, items = server.recommend(asked, options.k)
    for user, (found, rated) in enumerate(zip(histories.item_ids[items.numpy()], scores)):
        shown = ", ".join(f"{item} ({score:.2f})" for item, score in zip(found, rated.tolist()))
        print(f"user {histories.user_ids[user]}: {shown}")


if __name__ == "__main__":
    main()
