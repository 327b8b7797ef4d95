"""The model that a random case trains, its optimizer and its schedule."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from random_batches import SAMPLES, Batch, changed
from random_cases import Case, Part
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

HIDDEN, SCALES, EPS = 8, 5, 1e-4  # with a smaller eps, rounding becomes a step where gradients cancel


def lazily(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return an optimizer of torch's that leaves the rows of ``tables`` alone which have no gradient."""

    class Lazy(kind):
        tables: tuple[Tensor, ...] = ()

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else torch.enable_grad()(closure)()
            before = []
            for weight in self.tables:
                if weight.grad is not None:
                    state = self.state.get(weight, {})
                    moments = {name: value.clone() for name, value in state.items() if value.shape == weight.shape}
                    before.append((weight, weight.clone(), moments))
            super().step()
            for weight, old, moments in before:
                untouched = ~weight.grad.any(dim=1)
                weight[untouched] = old[untouched]
                for name, value in self.state[weight].items():
                    if value.shape == weight.shape:
                        value[untouched] = moments[name][untouched] if name in moments else 0.0
            return loss

    return Lazy


class Model(L.LightningModule):
    """Mean-pooled rows of every lookup, each through a layer of its own, and one more layer."""

    def __init__(self, case: Case, lazy: bool) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True
        torch.manual_seed(case.seed)
        self.case, self.lazy, self.losses, self.predictions = case, lazy, [], []
        self.parts, self.layers = nn.ModuleList(), nn.ModuleList()
        for index, part in enumerate(case.parts):
            self.parts.append(nn.Embedding(part.rows[0], part.dim) if part.plain else _collection(index, part))
            self.layers.append(nn.Linear(part.width, HIDDEN))
        self.last = nn.Linear(HIDDEN, 1)
        learned = [str(index) for index, part in enumerate(case.parts) if part.weights == "learned"]
        self.scales = nn.ParameterDict({index: torch.linspace(0.5, 1.5, SCALES)[None] for index in learned})

    def on_train_start(self) -> None:
        """Draw dropout as every other fit of this case; what TorchRec exchanges is not compared."""
        engine: Any = getattr(self.trainer.strategy, "engine", None)
        if engine is not None and engine.plain:
            raise NotImplementedError(f"left to TorchRec: {engine.plain}")
        torch.manual_seed(31 * self.case.seed + self.global_rank)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss, and keep it."""
        loss = self._loss(batch)
        if batch["first"]:
            self.losses.append(0.0)
        self.losses[-1] += loss.item() * len(batch["label"]) / SAMPLES
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Keep the loss."""
        self.losses.append(self._loss(batch).item())

    def predict_step(self, batch: Batch, batch_idx: int) -> None:
        """Keep the predictions."""
        self.predictions.append(self._scores(batch).tolist())

    def _loss(self, batch: Batch) -> Tensor:
        return (self._scores(batch) - batch["label"]).square().mean()

    def _scores(self, batch: Batch) -> Tensor:
        hidden: Any = self.last.weight.new_zeros(len(batch["label"]), HIDDEN)
        for index, part in enumerate(self.case.parts):
            for lookup in range(part.lookups):
                if lookup and part.when == "some steps" and batch["step"] % 3 != 1:
                    continue
                if part.when == "some ranks" and self.global_rank and batch["step"] % 2:
                    continue
                hidden = hidden + (1 + lookup) * torch.tanh(self.layers[index](self._looked_up(index, lookup, batch)))
        hidden = nn.functional.dropout(hidden, self.case.dropout, self.training)
        return self.last(torch.tanh(hidden)).squeeze(1)

    def _looked_up(self, index: int, lookup: int, batch: Batch) -> Tensor:
        """Return one row per sample, ``part.width`` wide."""
        part, given = self.case.parts[index], batch["lookups"][index][lookup]
        ids = given if part.plain else given.values()
        if part.ids == "computed":
            ids = (ids * 5 + 1) % min(part.rows)
        elif part.ids == "drawn":
            ids = (torch.rand(ids.shape) * min(part.rows)).to(ids.dtype)
        if part.plain:
            return self.parts[index](ids).mean(dim=1)
        weights = given.weights_or_none()
        if part.weights == "learned":
            weights = self.scales[str(index)][0, ids.long() % SCALES]
        if part.ids != "batch" or part.weights == "learned":
            given = changed(given, ids, weights)
        found = self.parts[index](given)
        if part.bags:
            return found.values()
        sums: Any = 0.0
        for rows in found.values():
            lengths = rows.lengths().long()
            sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            sums = sums + torch.zeros(len(lengths), part.dim).index_add(0, sample, rows.values().float())
        return sums

    def configure_optimizers(self) -> Any:
        """Return the optimizer of the case over one or two parameter groups, and its schedule."""
        tables = [parameter for name, parameter in self.named_parameters() if name.startswith("parts.")]
        dense = [parameter for name, parameter in self.named_parameters() if not name.startswith("parts.")]
        kinds: dict[str, tuple[type[torch.optim.Optimizer], float, dict[str, Any]]] = {
            "sgd": (torch.optim.SGD, 0.1, {}),
            "adagrad": (torch.optim.Adagrad, 0.05, {"eps": EPS}),
            "rowwise_adagrad": (RowWiseAdagrad, 0.05, {"eps": EPS}),
            "adam": (torch.optim.Adam, 0.01, {"eps": EPS}),
            "adamw": (torch.optim.AdamW, 0.01, {"eps": EPS, "weight_decay": 0.02}),
        }
        kind, rate, options = kinds[self.case.optimizer]
        if self.case.optimizer == "rowwise_adagrad":  # has no rows in a bias
            dense = [parameter for parameter in dense if parameter.dim() == 2]
        lazy = self.lazy and self.case.optimizer in ("adam", "adamw")
        groups: list[dict[str, Any]] = [{"params": dense + tables}]
        if self.case.groups == 2:
            groups = [{"params": dense}, {"params": tables, "lr": 2 * rate}]
        optimizer: Any = (lazily(kind) if lazy else kind)(groups, lr=rate, **options)
        if lazy:
            optimizer.tables = tuple(tables)
        return self._scheduled(optimizer, rate)

    def _scheduled(self, optimizer: Any, rate: float) -> Any:
        schedule: Any
        if self.case.schedule == "rate":
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        elif self.case.schedule == "one cycle":  # of Adam it cycles the betas, too
            adam, steps = self.case.optimizer.startswith("adam"), self.case.steps * self.case.epochs + 1
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * rate, total_steps=steps, cycle_momentum=adam)
        else:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _collection(index: int, part: Part) -> nn.Module:
    configs: list[Any] = []
    for table, (rows, dim, names) in enumerate(zip(part.rows, part.dims, part.names)):
        of_both: dict[str, Any] = {"num_embeddings": rows, "embedding_dim": dim, "feature_names": names}
        of_both["name"] = f"t{index}_{table}"
        if part.bags:
            pooling = PoolingType.MEAN if part.bags[table] == "mean" else PoolingType.SUM
            configs.append(EmbeddingBagConfig(**of_both, pooling=pooling))
        else:
            configs.append(EmbeddingConfig(**of_both))
    if part.bags:
        return EmbeddingBagCollection(tables=configs, is_weighted="weighted" in part.bags)
    return EmbeddingCollection(tables=configs)
