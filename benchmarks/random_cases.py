"""Random models, data, optimizers and Trainer options, all small, for :mod:`random_parity` and its test."""

from __future__ import annotations

import os
import random
import warnings
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.balance import MicroBatches

SAMPLES, HIDDEN, EPS = 4, 8, 1e-4  # with a smaller eps, rounding becomes a step where gradients cancel
Batch = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One collection, or one plain ``nn.Embedding``, and what a step looks up in it.

    Attributes:
        rows: of each table; an ``nn.Embedding`` has one.
        features: of each table.
        dim: width of a row.
        plain: whether it is an ``nn.Embedding``.
        lookups: how often a step looks it up, at most.
        ids: where the ids come from: ``"batch"``, ``"computed"`` or ``"drawn"`` in the step.
        when: in which steps and on which ranks all lookups are made: ``"always"``, ``"some steps"``, ``"some ranks"``.
        bags: of each table how its bags are pooled, ``"sum"``, ``"mean"`` or ``"weighted"``; empty for sequences.
        wide: of each table of bags whether its rows are twice as wide.
    """

    rows: tuple[int, ...]
    features: tuple[int, ...]
    dim: int
    plain: bool
    lookups: int
    ids: str
    when: str
    bags: tuple[str, ...] = ()
    wide: tuple[bool, ...] = ()

    @property
    def width(self) -> int:
        """Numbers that a lookup returns for a sample."""
        if not self.bags:
            return self.dim
        return sum(self.dim * (1 + wide) * count for wide, count in zip(self.wide, self.features))


@dataclass(frozen=True)
class Case:
    """What is trained, and how; see :func:`random_case`."""

    seed: int
    ranks: int
    parts: tuple[Part, ...]
    optimizer: str
    groups: int
    schedule: str
    steps: int
    epochs: int
    window: int
    clip: str
    lookahead: str
    validates: bool
    dropout: float
    split_backward: bool
    micro_batches: int = 1
    nodes: int = 1


def random_case(seed: int) -> Case:
    """Return the case of a seed."""
    draw = random.Random(seed)
    pick = draw.choice

    def part() -> Part:
        plain = draw.random() < 0.3
        tables = 1 if plain else pick([1, 1, 2, 3])
        return Part(
            rows=tuple(pick([1, 3, 7, 50, 300]) for _ in range(tables)),
            features=tuple(1 if plain else pick([1, 1, 2]) for _ in range(tables)),
            dim=pick([4, 8, 16]),
            plain=plain,
            lookups=pick([1, 1, 2, 3]),
            ids=pick(["batch", "batch", "computed", "drawn"]),
            when=pick(["always", "always", "some steps", "some ranks"]),
        )

    bags = random.Random(f"bags {seed}")  # its own: what a seed has drawn without them stays

    def in_bags(part: Part) -> Part:
        if part.plain or bags.random() < 0.5:
            return part
        tables, pooling = len(part.rows), [["weighted"], ["sum", "mean"]][bags.random() < 0.7]
        pooled, wide = (tuple(bags.choice(choices) for _ in range(tables)) for choices in (pooling, [False, False, True]))
        return replace(part, bags=pooled, wide=wide)

    return Case(
        seed=seed,
        ranks=pick([1, 2, 2, 3]),
        parts=tuple(in_bags(part()) for _ in range(pick([1, 1, 2]))),
        optimizer=pick(["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw"]),
        groups=pick([1, 1, 2]),
        schedule=pick(["none", "rate", "one cycle"]),
        steps=pick([4, 6]),
        epochs=pick([1, 2]),
        window=pick([1, 1, 2]),
        clip=pick(["none", "none", "norm", "value"]),
        lookahead=pick(["batch", "batch", "batch", "trial_run"]),
        validates=draw.random() < 0.3,
        dropout=pick([0.0, 0.2]),
        split_backward=random.Random(f"split {seed}").random() < 0.5,
    )


def divided(case: Case) -> Case:
    """Return the same case with steps in micro-batches; without random draws, which come in another order then."""
    parts = tuple(replace(part, ids="computed" if part.ids == "drawn" else part.ids) for part in case.parts)
    return replace(case, parts=parts, dropout=0.0, micro_batches=2 + case.seed % 3)


def on_two_nodes(case: Case) -> Case:
    """Return the same case with 4 ranks, 2 on each of 2 nodes, whose exchange is in two levels."""
    return replace(case, ranks=4, nodes=2)


def sharded_ways(case: Case) -> tuple[str, ...]:
    """Return the names of the fits that are compared with that under ``"ddp"``."""
    return ("freescale", "dedup=False") if case.nodes == 1 else ("two_level",)


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
        torch.manual_seed(case.seed)
        self.case, self.lazy, self.losses = case, lazy, []
        self.parts, self.layers = nn.ModuleList(), nn.ModuleList()
        for index, part in enumerate(case.parts):
            self.parts.append(nn.Embedding(part.rows[0], part.dim) if part.plain else _collection(index, part))
            self.layers.append(nn.Linear(part.width, HIDDEN))
        self.last = nn.Linear(HIDDEN, 1)

    def on_train_start(self) -> None:
        """Draw dropout as every other fit of this case."""
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

    def _loss(self, batch: Batch) -> Tensor:
        hidden: Any = self.last.weight.new_zeros(len(batch["label"]), HIDDEN)
        for index, part in enumerate(self.case.parts):
            for lookup in range(part.lookups):
                if lookup and part.when == "some steps" and batch["step"] % 3 != 1:
                    continue
                # without gradients TorchRec looks up, which is for all ranks
                if part.when == "some ranks" and self.training and self.global_rank and batch["step"] % 2:
                    continue
                hidden = hidden + (1 + lookup) * torch.tanh(self.layers[index](self._looked_up(index, lookup, batch)))
        hidden = nn.functional.dropout(hidden, self.case.dropout, self.training)
        return (self.last(torch.tanh(hidden)).squeeze(1) - batch["label"]).square().mean()

    def _looked_up(self, index: int, lookup: int, batch: Batch) -> Tensor:
        """Return one row per sample, ``part.width`` wide."""
        part, given = self.case.parts[index], batch["lookups"][index][lookup]
        ids = given if part.plain else given.values()
        if part.ids == "computed":
            ids = (ids * 5 + 1) % min(part.rows)
        elif part.ids == "drawn":
            ids = (torch.rand(ids.shape) * min(part.rows)).long()
        if part.plain:
            return self.parts[index](ids).mean(dim=1)
        if part.ids != "batch":
            given = KeyedJaggedTensor(given.keys(), ids, given.weights_or_none(), given.lengths())
        found = self.parts[index](given)
        if part.bags:
            return found.values()
        sums: Any = 0.0
        for name in given.keys():  # noqa: SIM118 (it is no dict)
            lengths = found[name].lengths().long()
            sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            sums = sums + torch.zeros(len(lengths), part.dim).index_add(0, sample, found[name].values())
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
    numbered, configs = iter(range(sum(part.features))), []
    for table, rows in enumerate(part.rows):
        name, features = f"t{index}_{table}", [f"f{next(numbered)}" for _ in range(part.features[table])]
        if part.bags:
            pooling = PoolingType.MEAN if part.bags[table] == "mean" else PoolingType.SUM
            dim = part.dim * (1 + part.wide[table])
            configs.append(
                EmbeddingBagConfig(embedding_dim=dim, num_embeddings=rows, name=name, feature_names=features, pooling=pooling)
            )
        else:
            configs.append(EmbeddingConfig(embedding_dim=part.dim, num_embeddings=rows, name=name, feature_names=features))
    if part.bags:
        return EmbeddingBagCollection(tables=configs, is_weighted="weighted" in part.bags)
    return EmbeddingCollection(tables=configs)


def _cut(batch: Batch, micro_batches: int) -> MicroBatches:
    """Cut a batch by its samples."""
    parts = torch.arange(SAMPLES).tensor_split(micro_batches)

    def some(given: Any, samples: Tensor) -> Any:
        if isinstance(given, Tensor):
            return given[samples]
        lengths = given.lengths().view(len(given.keys()), SAMPLES)
        chosen = torch.zeros_like(lengths, dtype=torch.bool)
        chosen[:, samples] = True
        of_part, weights = torch.repeat_interleave(chosen.view(-1), lengths.view(-1)), given.weights_or_none()
        weights = None if weights is None else weights[of_part]
        return KeyedJaggedTensor(given.keys(), given.values()[of_part], weights, lengths[:, samples].reshape(-1))

    batches = [
        {
            "lookups": [[some(given, samples) for given in lookups] for lookups in batch["lookups"]],
            "label": batch["label"][samples],
            "step": batch["step"],
            "first": index == 0,
        }
        for index, samples in enumerate(parts)
    ]
    return MicroBatches(tuple(batches), tuple(len(samples) / SAMPLES for samples in parts))


def _loader(case: Case, rank: int, salt: int = 0, micro_batches: int = 1) -> DataLoader:
    draw = torch.Generator().manual_seed(7 * case.seed + 1009 * rank + salt)

    def lookup(part: Part) -> Any:
        if part.plain:
            return torch.randint(0, part.rows[0], (SAMPLES, 3), generator=draw)
        rows = [rows for rows, features in zip(part.rows, part.features) for _ in range(features)]
        lengths = torch.randint(0, 5, (len(rows), SAMPLES), generator=draw)
        ids = [torch.randint(0, most, (int(each.sum()),), generator=draw) for most, each in zip(rows, lengths)]
        weights = torch.rand(int(lengths.sum()), generator=draw) + 0.5 if "weighted" in part.bags else None
        return KeyedJaggedTensor([f"f{index}" for index in range(len(rows))], torch.cat(ids), weights, lengths.view(-1))

    batches = [
        {
            "lookups": [[lookup(part) for _ in range(part.lookups)] for part in case.parts],
            "label": torch.rand(SAMPLES, generator=draw),
            "step": step,
            "first": True,
        }
        for step in range(case.steps)
    ]
    if micro_batches > 1:
        batches = [_cut(batch, micro_batches) for batch in batches]
    return DataLoader(batches, batch_size=None, generator=torch.Generator().manual_seed(1))


@dataclass
class Outcome:
    """What a fit leaves behind on one rank: its error, or losses and, whole on rank 0, weights."""

    error: str = ""
    steps: int = 0
    losses: tuple[float, ...] = ()
    weights: dict[str, Tensor] | None = None
    random_state: Tensor | None = None


def run_case(case: Case) -> dict[str, Outcome]:
    """Train on the ranks of ``run_distributed``, in each way that is compared."""
    plain = [f"parts.{index}" for index, part in enumerate(case.parts) if part.plain]
    options: dict[str, Any] = {"find_unused_parameters": True, "shard": plain or None}
    ahead = {"lookahead": case.lookahead, "split_backward": case.split_backward}
    if case.nodes > 1:
        rank, each = int(os.environ["RANK"]), case.ranks // case.nodes
        os.environ.update(LOCAL_RANK=str(rank % each), GROUP_RANK=str(rank // each), LOCAL_WORLD_SIZE=str(each))
        return {
            "ddp": _fit(case, DDPStrategy(find_unused_parameters=True)),
            "two_level": _fit(case, FreeScaleStrategy(**options, **ahead, exchange="two_level")),
        }
    return {
        "ddp": _fit(case, DDPStrategy(find_unused_parameters=True)),
        "freescale": _fit(case, FreeScaleStrategy(**options, **ahead)),
        "dedup=False": _fit(case, FreeScaleStrategy(**options, **ahead, dedup=False)),
    }


def _fit(case: Case, strategy: Any) -> Outcome:
    rank, module = int(os.environ["RANK"]), Model(case, lazy=not isinstance(strategy, FreeScaleStrategy))
    clip = {"none": {}, "norm": {"gradient_clip_val": 0.1}}.get(
        case.clip, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=case.ranks // case.nodes,
        num_nodes=case.nodes,
        max_epochs=case.epochs,
        accumulate_grad_batches=case.window,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **clip,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = case.micro_batches if isinstance(strategy, FreeScaleStrategy) else 1
            trainer.fit(
                module, _loader(case, rank, micro_batches=parts), _loader(case, rank, salt=5) if case.validates else None
            )
    except Exception as error:
        return Outcome(error=f"{type(error).__name__}: {error}", steps=len(module.losses))
    weights = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]
    return Outcome("", len(module.losses), tuple(module.losses), weights, torch.get_rng_state())


def defects(ranks: list[dict[str, Outcome]], tolerance: float = 1e-4) -> list[str]:
    """Return where what ranks have left behind departs from ``"ddp"``; a refusal before the first step is none.

    Args:
        ranks: what :func:`run_case` has returned on each.
        tolerance: of losses, and of weights relative to the largest of a tensor.
    """
    found = []
    for name in [name for name in ranks[0] if name != "ddp"]:
        for rank, outcomes in enumerate(ranks):
            theirs, mine = outcomes["ddp"], outcomes[name]
            if theirs.error or (mine.error and not mine.steps):
                continue
            if mine.error:
                found.append(f"{name}, rank {rank}: {mine.error[:300]}")
                continue
            worst = max((abs(a - b) / max(abs(a), 1e-2) for a, b in zip(theirs.losses, mine.losses)), default=0.0)
            if worst > tolerance or len(theirs.losses) != len(mine.losses):
                found.append(f"{name}, rank {rank}: losses differ by {worst:.1e}")
            if not torch.equal(theirs.random_state, mine.random_state):
                found.append(f"{name}, rank {rank}: random numbers differ")
            if not rank:
                found += [f"{name}: {text}" for text in _different(theirs.weights or {}, mine.weights or {}, tolerance)]
    return found


def _different(theirs: dict[str, Tensor], mine: dict[str, Tensor], tolerance: float) -> list[str]:
    if theirs.keys() != mine.keys():
        return [f"names differ: {sorted(theirs.keys() ^ mine.keys())}"]
    off = {key: float((mine[key] - value).abs().max() / value.abs().max().clamp(min=1e-2)) for key, value in theirs.items()}
    return [f"{key} differs by {amount:.1e}" for key, amount in off.items() if not amount <= tolerance]
