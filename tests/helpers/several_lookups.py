"""A sequence model that looks one table up several times in a step, as SASRec does, in all the ways that models do so."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

ITEMS, DIM, SAMPLES, LENGTH = 40, 4, 6, 5
Batch = dict[str, Any]


class LazyAdam(torch.optim.Optimizer):
    """Adam that moves a table's row only in steps that have a gradient for it; the rest is torch's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)
        return loss

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, gradient, (beta1, beta2) = self.state[weight], weight.grad, group["betas"]
        state.setdefault("step", 0)
        state["step"] += 1
        first = state.setdefault("exp_avg", torch.zeros_like(weight))
        second = state.setdefault("exp_avg_sq", torch.zeros_like(weight))
        rows = gradient.abs().sum(dim=1) > 0 if weight.shape == (ITEMS, DIM) else slice(None)
        first[rows] = first[rows].lerp(gradient[rows], 1 - beta1)
        second[rows] = beta2 * second[rows] + (1 - beta2) * gradient[rows] ** 2
        root = (second[rows] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
        weight[rows] -= group["lr"] * first[rows] / (1 - beta1 ** state["step"]) / root


def batches(rank: int, steps: int) -> list[Batch]:
    """Histories, and a positive and a negative item for each of their items."""
    found = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(100 * step + rank)
        lengths = torch.randint(0, LENGTH, (SAMPLES,), generator=draw)
        names = ("history", "positive", "negative")
        ids = {name: torch.randint(0, ITEMS, (int(lengths.sum()),), generator=draw) for name in names}
        found.append({**{name: _jagged(each, lengths) for name, each in ids.items()}, "label": torch.rand(1, generator=draw)})
    return found


def _jagged(ids: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["item"], values=ids, lengths=lengths.clone())


def loader(rank: int, steps: int) -> DataLoader:
    """This rank's batches in order."""
    return DataLoader(batches(rank, steps), batch_size=None)


class ThreeLookups(L.LightningModule):
    """History, positive and negative items, one after the other."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        config = EmbeddingConfig(name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["item"])
        self.items = EmbeddingCollection(tables=[config])
        self.query, self.optimizer, self.losses = nn.Linear(DIM, DIM, bias=False), optimizer, []
        draw = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.5)
        self.statistics: dict[str, float] = {}

    def look_up(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.items(ids)["item"].values()

    def negatives(self, batch: Batch, batch_idx: int) -> KeyedJaggedTensor | None:
        return batch["negative"]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.query(self.look_up(batch["history"])))
        scores = (hidden * self.look_up(batch["positive"])).sum(dim=1)
        loss = nn.functional.softplus(-scores).sum() + batch["label"].sum()
        negative = self.negatives(batch, batch_idx)
        if negative is not None:
            loss = loss + nn.functional.softplus((hidden * self.look_up(negative)).sum(dim=1)).sum()
        return self.kept(loss / SAMPLES)

    def kept(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return loss

    def on_train_end(self) -> None:
        controller = getattr(self.trainer.strategy, "overlap_controller", None)
        if controller is not None:
            self.statistics = controller.engine.statistics()

    def configure_optimizers(self) -> Any:
        kinds = {
            "sgd": (torch.optim.SGD, 0.1),
            "adagrad": (torch.optim.Adagrad, 0.05),
            "rowwise_adagrad": (RowWiseAdagrad, 0.05),
            "adam": (torch.optim.Adam, 0.02),
            "lazy_adam": (LazyAdam, 0.02),
        }
        kind, rate = kinds[self.optimizer]
        return kind(self.parameters(), lr=rate)


class Conditional(ThreeLookups):
    """Negatives in every third step only, first in the fourth one."""

    def negatives(self, batch: Batch, batch_idx: int) -> KeyedJaggedTensor | None:
        return batch["negative"] if batch_idx % 3 == 0 and batch_idx else None


class Drawn(ThreeLookups):
    """Negatives that stand nowhere in the batch."""

    def negatives(self, batch: Batch, batch_idx: int) -> KeyedJaggedTensor:
        count = batch["negative"].values().numel()
        draw = torch.Generator().manual_seed(1000 + 10 * batch_idx + self.global_rank)
        return _jagged(torch.randint(0, ITEMS, (count,), generator=draw), batch["negative"].lengths())


class OnSomeRanks(ThreeLookups):
    """Negatives on the first rank, in odd steps."""

    def negatives(self, batch: Batch, batch_idx: int) -> KeyedJaggedTensor | None:
        return batch["negative"] if self.global_rank == 0 and batch_idx % 2 else None


class NothingOnSomeRanks(ThreeLookups):
    """In odd steps only the first rank looks anything up."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.global_rank == 0 or batch_idx % 2 == 0:
            return super().training_step(batch, batch_idx)
        return self.kept(self.query(batch["label"].expand(DIM)).square().mean())


class NothingInSomeSteps(ThreeLookups):
    """In every third step no rank looks anything up."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx % 3 != 1:
            return super().training_step(batch, batch_idx)
        return self.kept(self.query(batch["label"].expand(DIM)).square().mean())


class Detaches(ThreeLookups):
    """In odd steps positives are looked up, and lead to no gradient."""

    def look_up(self, ids: KeyedJaggedTensor) -> Tensor:
        self.calls = getattr(self, "calls", -1) + 1
        rows = super().look_up(ids)
        return rows.detach() if self.calls % 6 == 4 else rows


class InPlace(ThreeLookups):
    """Changes what it has looked up."""

    def look_up(self, ids: KeyedJaggedTensor) -> Tensor:
        return super().look_up(ids).mul_(1.5).add_(0.25)


class TheSameTwice(ThreeLookups):
    """Looks the same ids up again."""

    def negatives(self, batch: Batch, batch_idx: int) -> KeyedJaggedTensor:
        return batch["positive"]


class Checkpointed(ThreeLookups):
    """Does not keep what it has computed of the rows, but looks them up again in backward."""

    def look_up(self, ids: KeyedJaggedTensor) -> Tensor:
        scale = torch.ones(1, requires_grad=True)
        look_up = super().look_up
        return checkpoint(lambda factor: torch.sin(look_up(ids) * factor), scale, use_reentrant=False)


class TwoCollections(ThreeLookups):
    """Another one beside."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        config = EmbeddingConfig(name="other", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["item"])
        self.others = EmbeddingCollection(tables=[config])
        draw = torch.Generator().manual_seed(1)
        self.others.embeddings["other"].weight.data.copy_(torch.randn(ITEMS, DIM, generator=draw) * 0.5)

    def computed(self, batch: Batch, scale: int) -> KeyedJaggedTensor:
        return _jagged((batch["history"].values() * 7 + scale) % ITEMS, batch["history"].lengths())


class Crosswise(TwoCollections):
    """In odd steps every rank looks up a collection of its own, once or twice, by ids that stand nowhere in the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        chosen = [self.items, self.others]
        if batch_idx % 2:
            chosen = chosen[self.global_rank % 2 :][:1] * (1 + batch_idx % 3)
        hidden: Any = 0.0
        for scale, collection in enumerate(chosen, 1):
            found = collection(self.computed(batch, scale))["item"].values()
            hidden = hidden + scale * torch.tanh(self.query(found))
        return self.kept((hidden.sum() / 10 - batch["label"].sum()).square())


class SubmittedInVain(TwoCollections):
    """Waits for one collection's rows while the other's have been submitted, which it does not look up in odd steps."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.query(self.look_up(self.computed(batch, 1))))
        if batch_idx % 2 == 0:
            hidden = hidden * self.others(batch["history"])["item"].values()
        return self.kept((hidden.sum() / 10 - batch["label"].sum()).square())


class WrongLater(Drawn):
    """On the second rank a later lookup holds an id that no row exists for."""

    def negatives(self, batch: Batch, batch_idx: int) -> KeyedJaggedTensor:
        ids = super().negatives(batch, batch_idx)
        return _jagged(ids.values() + ITEMS, ids.lengths()) if self.global_rank and batch_idx == 4 else ids


KINDS = {
    kind.__name__: kind
    for kind in (
        ThreeLookups,
        Conditional,
        Drawn,
        OnSomeRanks,
        NothingOnSomeRanks,
        NothingInSomeSteps,
        Detaches,
        InPlace,
        TheSameTwice,
        Checkpointed,
        Crosswise,
        SubmittedInVain,
    )
}
"""What trains; the rest is refused."""
