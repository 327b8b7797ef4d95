"""The LightningModule and the data that the tests train, written as a user would write them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale.balance import CostModel
from lightning_freescale.data import BalanceOptions

ITEMS, CATEGORIES, DIM = 50, 13, 8
FEATURES = ["history", "candidate", "category"]
REPEATS: dict[str, Any] = {"balance": BalanceOptions(assignment_mode="fixed"), "cost": CostModel()}
"""Of runs that are compared to the bit: no plan depends on the clock."""
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rowwise_adagrad": lambda params: RowWiseAdagrad(params, lr=0.1),
}


def tables() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["history", "candidate"]),
        EmbeddingConfig(name="cat", num_embeddings=CATEGORIES, embedding_dim=DIM, feature_names=["category"]),
    ]


class Net(nn.Module):
    """Mean of the history against one candidate."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(tables=tables(), device=device)
        self.hidden = nn.Sequential(  # without biases: RowWiseAdagrad takes matrices only
            nn.Linear(2 * DIM, 3 * DIM, bias=False), nn.Tanh(), nn.Linear(3 * DIM, DIM, bias=False)
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found = self.embeddings(features)
        pooled = torch.segment_reduce(found["history"].values(), "mean", lengths=found["history"].lengths().long(), initial=0.0)
        hidden = self.hidden(torch.cat([pooled, found["category"].values()], dim=1))
        return (hidden * found["candidate"].values()).sum(dim=1)


class Recommender(L.LightningModule):
    """Trains :class:`Net`, or a net of another kind, and keeps its losses."""

    kind: type[nn.Module] = Net

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.net, self.optimizer, self.losses = self.kind(), optimizer, []
        self.dropout = 0.0

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        predicted = nn.functional.dropout(self.net(batch["features"]), self.dropout)
        loss = nn.functional.mse_loss(predicted, batch["label"])
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch["features"]), batch["label"]), sync_dist=True)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("test", nn.functional.mse_loss(self.net(batch["features"]), batch["label"]), sync_dist=True)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return self.net(batch["features"])

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


class ActsInHook(Recommender):
    """Some ranks do something in a hook, the ``at``-th time it is called."""

    def __init__(self, hook: str, ranks: Collection[int], act: Callable[[], Any], at: int = 1) -> None:
        super().__init__()
        self.hook, self.ranks, self.act, self.left = hook, ranks, act, at

    def pass_by(self, hook: str) -> None:
        if hook == self.hook and dist.get_rank() in self.ranks:
            self.left -= 1
            if self.left == 0:
                self.act()

    def setup(self, stage: str) -> None:
        self.pass_by("setup")

    def configure_model(self) -> None:
        self.pass_by("configure_model")

    def configure_optimizers(self) -> Any:
        self.pass_by("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.pass_by("on_fit_start")

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.pass_by("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.pass_by("on_before_optimizer_step")

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.pass_by("validation_step")
        super().validation_step(batch, batch_idx)


class Samples(Dataset):
    def __init__(self, size: int = 120, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths = (torch.rand(size, generator=draw) ** 4 * 60).long() + 1
        self.histories = [torch.randint(0, ITEMS, (int(n),), generator=draw) for n in self.lengths]
        self.candidates = torch.randint(0, ITEMS, (size,), generator=draw)
        self.categories = torch.randint(0, CATEGORIES, (size,), generator=draw)
        self.labels = torch.rand(size, generator=draw)

    def __len__(self) -> int:
        return len(self.histories)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "history": self.histories[index],
            "candidate": self.candidates[index],
            "category": self.categories[index],
            "label": self.labels[index],
        }


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Jagged histories, one candidate and one category per sample."""
    lengths = [len(s["history"]) for s in samples] + [1] * (2 * len(samples))
    values = [s["history"] for s in samples] + [s[name][None] for name in ("candidate", "category") for s in samples]
    features = KeyedJaggedTensor(keys=FEATURES, values=torch.cat(values), lengths=torch.tensor(lengths, dtype=torch.int32))
    return {
        "features": features,
        "label": torch.stack([s["label"] for s in samples]),
        "index": torch.tensor([s["index"] for s in samples]),
    }


class RankBatches(Dataset):
    def __init__(self, rank: int, steps: int, batch_size: int = 4) -> None:
        samples = Samples(batch_size * steps, seed=100 + rank)
        self.batches = [collate([samples[i] for i in range(s * batch_size, (s + 1) * batch_size)]) for s in range(steps)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.batches[index]


def fixed_loader(rank: int, steps: int) -> DataLoader:
    return DataLoader(RankBatches(rank, steps), batch_size=None)


class StopAt(L.Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def trainer(**options: Any) -> L.Trainer:
    """A quiet Trainer on the ranks of ``run_distributed``."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return L.Trainer(**{"max_epochs": 1, "strategy": "freescale", **quiet, **options})
