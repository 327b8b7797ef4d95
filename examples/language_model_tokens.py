"""A small language model with a sharded table of tokens, and the limits of overlap for such a table.

``python examples/language_model_tokens.py`` trains on two ranks. A step of text looks up nearly all frequent tokens, so most
rows of the next step collide: they need the gradients of this step, and only rare rows can be exchanged ahead. Two options
reduce the wait:

- ``--micro-batches 2``: rows do not change within a step, so only the rows of the first part and the gradients of the last part
  are exposed.
- ``--split-backward``: the gradients of the dense weights, the largest part of a language model, are computed while those of
  the rows are exchanged.

Run the example with and without these options, and compare the reports.

Shard only tables whose rows are looked up. A softmax over all tokens needs the whole weight, so the output layer is a separate
weight that DDP trains. It is not tied to the table.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.balance import CostModel

TOKENS, DIM, LAYERS, LONGEST = 1_000, 64, 2, 256
PADDING = 0  # tokens start at 1


class Text(Dataset[Tensor]):
    """Synthetic documents with few frequent tokens. The previous token determines half of the tokens."""

    def __init__(self, documents: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths = torch.empty(documents).log_normal_(4, 0.8, generator=draw).clamp(4, LONGEST).long()
        self.seeds = torch.randint(2**31, (documents,), generator=draw)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        """Return the tokens, shape ``[length + 1]``."""
        draw = torch.Generator().manual_seed(int(self.seeds[index]))
        count = int(self.lengths[index]) + 1
        tokens = (TOKENS ** torch.rand(count, generator=draw)).long()  # by Zipf's law
        follows = torch.rand(count, generator=draw) < 0.5
        for place in range(1, count):
            if follows[place]:
                tokens[place] = tokens[place - 1] * 7 % 100 + 1
        return tokens


def collate(documents: list[Tensor]) -> dict[str, Tensor]:
    """Return ``ids``, the ids of the lookup, and ``target``, both int64 of shape ``[documents, longest]``."""
    tokens = pad_sequence(documents, batch_first=True, padding_value=PADDING)
    return {"ids": tokens[:, :-1] * (tokens[:, 1:] != PADDING), "target": tokens[:, 1:]}


class LanguageModel(L.LightningModule):
    """A causal transformer with an ordinary ``nn.Embedding``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS + 1, DIM, padding_idx=PADDING)
        self.positions = nn.Embedding(LONGEST, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.norm = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False), nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, TOKENS + 1)
        self.negative_log = MeanMetric()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next tokens, shape ``[documents, longest, TOKENS + 1]``. The causal mask hides padding."""
        longest = ids.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(longest, device=ids.device)
        x = self.tokens(ids) + self.positions.weight[:longest]
        return self.output(self.norm(self.layers(x, mask=later, is_causal=True)))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss over the rank's tokens."""
        loss = nn.functional.cross_entropy(self(batch["ids"]).flatten(0, 1), batch["target"].flatten(), ignore_index=PADDING)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Update the mean negative log likelihood of all tokens. Its exponential is the perplexity."""
        known = batch["target"] != PADDING
        found = nn.functional.cross_entropy(self(batch["ids"])[known], batch["target"][known], reduction="none")
        self.negative_log.update(found)
        self.log("negative_log", self.negative_log, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one optimizer for all parameters, including the table."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    """Train, validate, and print the number of rows that collided."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--documents", type=int, default=2_000)
    parser.add_argument("--micro-batches", type=int, default=1, help="number of parts of a step")
    parser.add_argument("--split-backward", action="store_true", help="compute gradients of dense weights after those of rows")
    options = parser.parse_args()
    L.seed_everything(0)
    train = Text(options.documents)
    cost = CostModel.from_config(dim=DIM, layers=LAYERS, heads=2)
    data = FreeScaleDataModule(
        train, train.lengths, 32, cost=cost, collate_fn=collate, val_dataset=Text(200, seed=1),
        loss_reduction="target_mean", micro_batches=options.micro_batches,
    )  # fmt: skip
    strategy = FreeScaleStrategy(shard=["tokens"], split_backward=options.split_backward)
    trainer = L.Trainer(
        strategy=strategy, accelerator="auto", devices=2, max_epochs=options.epochs, callbacks=[BubbleProfiler()],
        logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(LanguageModel(), data)
    trainer.print(strategy.overlap_report)
    trainer.print("perplexity:", round(trainer.callback_metrics["negative_log"].exp().item(), 1))


if __name__ == "__main__":
    main()
