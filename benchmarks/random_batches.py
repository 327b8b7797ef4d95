"""Batches of a random case, whole or cut into micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from random_cases import Case, Part
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from lightning_freescale.balance import MicroBatches

SAMPLES = 4
Batch = dict[str, Any]


def _cut(batch: Batch, micro_batches: int, bags: list[bool]) -> MicroBatches:
    """Cut a batch by its samples; ``bags``: whether the lookups of each part of the model are of bags."""
    parts = torch.arange(SAMPLES).tensor_split(micro_batches)

    def some(given: Any, samples: Tensor, pooled: bool) -> Any:
        if isinstance(given, Tensor):
            return given[samples]
        inverse = given.inverse_indices_or_none()
        if inverse is not None:
            inverse = inverse[0], inverse[1][:, samples]
            if pooled:  # samples share bags: every micro-batch has them all
                return changed(given, given.values(), given.weights_or_none(), inverse)
        lengths = given.lengths().view(len(given.keys()), SAMPLES)
        chosen = torch.zeros_like(lengths, dtype=torch.bool)
        chosen[:, samples] = True
        of_part, weights = torch.repeat_interleave(chosen.view(-1), lengths.view(-1)), given.weights_or_none()
        weights = None if weights is None else weights[of_part]
        lengths = lengths[:, samples].reshape(-1)
        return KeyedJaggedTensor(given.keys(), given.values()[of_part], weights, lengths, inverse_indices=inverse)

    batches = [
        {
            "lookups": [[some(each, samples, pooled) for each in given] for given, pooled in zip(batch["lookups"], bags)],
            "label": batch["label"][samples],
            "step": batch["step"],
            "first": index == 0,
        }
        for index, samples in enumerate(parts)
    ]
    return MicroBatches(tuple(batches), tuple(len(samples) / SAMPLES for samples in parts))


def changed(given: KeyedJaggedTensor, ids: Tensor, weights: Tensor | None, inverse: Any = None) -> KeyedJaggedTensor:
    """Return a lookup of other ids, with other weights, or with other inverse indices."""
    strides = given.stride_per_key_per_rank() if given.variable_stride_per_key() else None
    inverse = given.inverse_indices_or_none() if inverse is None else inverse
    options = {"stride_per_key_per_rank": strides, "inverse_indices": inverse}
    return KeyedJaggedTensor(given.keys(), ids, weights, given.lengths(), **options)


def loader(case: Case, rank: int, salt: int = 0, micro_batches: int = 1, batches: int | None = None) -> DataLoader:
    """Return the batches of one rank, as many as a step has or ``batches``; ``salt`` makes others."""
    draw = torch.Generator().manual_seed(7 * case.seed + 1009 * rank + salt)

    def of_samples(bags: int) -> Tensor:
        """Make each bag that of a sample; otherwise its rows would have a gradient of zero, by which Adam moves them."""
        more = torch.randint(0, bags, (SAMPLES - bags,), generator=draw)
        return torch.cat([torch.arange(bags), more])[torch.randperm(SAMPLES, generator=draw)]

    def lookup(part: Part) -> Any:
        kind = torch.int32 if part.int32 else torch.int64
        if part.plain:
            return torch.randint(0, part.rows[0], (SAMPLES, 3), generator=draw, dtype=kind)
        keys, ranges = list(part.ranges), part.ranges | {"unused": 1000}
        if part.permuted:
            order = torch.randperm(len(keys) + 1, generator=torch.Generator().manual_seed(case.seed))  # the same in all lookups
            keys = [[*keys, "unused"][place] for place in order]
        strides = [SAMPLES] * len(keys)
        if part.bags and part.batches:
            strides = torch.randint(1, SAMPLES + 1, (len(keys),), generator=draw).tolist()
            strides = strides if part.batches == "variable" else strides[:1] * len(keys)
        lengths = [torch.randint(0, 5, (stride,), generator=draw) for stride in strides]
        ids = [torch.randint(0, ranges[k], (int(n.sum()),), generator=draw, dtype=kind) for k, n in zip(keys, lengths)]
        weighted = "weighted" in part.bags or part.weights == "ignored"
        weights = torch.rand(sum(map(len, ids)), generator=draw) + 0.5 if weighted else None
        options: dict[str, Any] = {}
        if part.batches:
            options["inverse_indices"] = keys, torch.stack([of_samples(stride) for stride in strides])
        if part.batches == "variable":
            options["stride_per_key_per_rank"] = [[stride] for stride in strides]
        return KeyedJaggedTensor(keys, torch.cat(ids), weights, torch.cat(lengths), **options)

    made = [
        {
            "lookups": [[lookup(part) for _ in range(part.lookups)] for part in case.parts],
            "label": torch.rand(SAMPLES, generator=draw),
            "step": step,
            "first": True,
        }
        for step in range(case.steps if batches is None else batches)
    ]
    bags = [bool(part.bags) for part in case.parts]
    whole_or_cut: list[Any] = [_cut(batch, micro_batches, bags) for batch in made] if micro_batches > 1 else made
    return DataLoader(whole_or_cut, batch_size=None, generator=torch.Generator().manual_seed(1))
