"""Modules that look ids up in their own ways, for the tests of the overlap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from tests.helpers.overlap_training import Batch, CountingModel, Record
from tests.helpers.recommender import DIM, FEATURES, ITEMS


class OfRecords(CountingModel):
    def training_step(self, batch: Record, batch_idx: int) -> Tensor:
        return super().training_step({"features": batch.features, "label": batch.label}, batch_idx)


class OfTensors(CountingModel):
    """Makes the KeyedJaggedTensor of tensors that stand in the batch."""

    def ids(self, batch: Batch) -> Tensor:
        return batch["ids"]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=self.ids(batch), lengths=batch["lengths"])
        return super().training_step({"features": features, "label": batch["label"]}, batch_idx)


class Computes(OfTensors):
    """Its ids stand nowhere in the batch."""

    def ids(self: OfTensors, batch: Batch) -> Tensor:
        items = int(batch["lengths"].view(3, -1)[:2].sum())
        return torch.cat([(batch["ids"][:items] * 7) % ITEMS, batch["ids"][items:]])


class RewritesThroughNumpy(OfTensors):
    """Its ids are rewritten in the batch where torch does not see it."""

    def ids(self, batch: Batch) -> Tensor:
        ids = batch["ids"].numpy()
        ids[:] = (ids + 5) % 13
        return batch["ids"]


class Draws(OfTensors):
    """Its candidates are drawn at random, and it draws after the lookup as well."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        self.dropout = 0.3

    def ids(self, batch: Batch) -> Tensor:
        ids, sizes = batch["ids"].clone(), batch["lengths"].view(3, -1).sum(dim=1).tolist()
        ids[sizes[0] : sizes[0] + sizes[1]] = torch.randint(0, ITEMS, (sizes[1],))
        return ids


class TwoCollections(CountingModel):
    """The second one holds a single tiny table."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        config = EmbeddingConfig(name="tag", num_embeddings=3, embedding_dim=DIM, feature_names=["tag"])
        self.tags = EmbeddingCollection(tables=[config])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        found = self.tags(batch["tags"])["tag"].values()
        loss = super().training_step(batch, batch_idx) + (found.mean(dim=1) - batch["label"]).square().mean()
        self.losses[-1] = loss.item()
        return loss


def with_tags(batch: Batch) -> Batch:
    count = len(batch["label"])
    tags = KeyedJaggedTensor(keys=["tag"], values=batch["index"] % 3, lengths=torch.ones(count, dtype=torch.int32))
    return {**batch, "tags": tags}


class Schedules(CountingModel):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AsksEarly(CountingModel):
    """Asks for the number of steps, so that Lightning makes the training loader before the strategy knows the tables."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Skips(CountingModel):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (2, 3) else loss


class Iterates(CountingModel):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        loss = nn.functional.mse_loss(self.net(batch["features"]), batch["label"])
        self.losses.append(loss.item())
        return loss


class OfSeveralLoaders(CountingModel):
    def training_step(self, batch: dict[str, Batch], batch_idx: int) -> Tensor:
        return super().training_step(batch["main"], batch_idx)


class ChangesInPlace(OfTensors):
    seen = 0

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        self.seen += 1
        batch["ids"] = batch["ids"].clone()
        batch["ids"].add_(self.seen).remainder_(13)
        return batch

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        batch["label"].add_(0.125)
        batch["ids"].mul_(3).remainder_(13)
        return batch


class StepsAfterClosure(CountingModel):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        closure()
        optimizer.step()


class CutsShort(CountingModel):
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


class LooksUpMore(TwoCollections):
    """Looks up without gradients before and after, and one collection in some steps only."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.losses.append(float(self.net(batch["features"]).sum()))
        loss = super().training_step(batch, batch_idx) if batch_idx % 3 else CountingModel.training_step(self, batch, batch_idx)
        with torch.no_grad():
            self.losses.append(float(self.net(batch["features"]).sum()))
        return loss


class DiffersByRank(Draws):
    """The first rank's ids stand in the batch, the second one computes them, the third one draws them."""

    def ids(self, batch: Batch) -> Tensor:
        if self.global_rank == 0:
            return batch["ids"]
        return Computes.ids(self, batch) if self.global_rank == 1 else super().ids(batch)


class Evaluates(CountingModel):
    """Looks up between steps, maybe with gradients: TorchRec would update the tables if backward was called."""

    def __init__(self, gradients: bool = False) -> None:
        super().__init__()
        self.gradients = gradients

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        with torch.set_grad_enabled(self.gradients):
            self.losses.append(float(self.net(batch["features"]).sum()))


class Freezes(CountingModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad([p for name, p in self.named_parameters() if "item" not in name], lr=0.1)
