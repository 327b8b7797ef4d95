"""Jagged ids of a batch, for tests."""

from __future__ import annotations

import torch
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.id_prediction import KJTSnapshot

KEYS = ["history", "category"]
LABEL = torch.zeros(3)


def make_features(seed: int = 0, weighted: bool = False, offsets: bool = False) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 4, (6,), generator=draw)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=draw)
    weights = torch.rand(len(values), generator=draw) if weighted else None
    if offsets:
        jagged = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return KeyedJaggedTensor(list(KEYS), values, weights, offsets=jagged)
    return KeyedJaggedTensor(list(KEYS), values, weights, lengths=lengths)


def copy_of(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights = features.weights_or_none()
    lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    return KeyedJaggedTensor(
        list(features.keys()),
        features.values().clone(),
        None if weights is None else weights.clone(),
        lengths=None if lengths is None else lengths.clone(),
        offsets=None if offsets is None else offsets.clone(),
    )


def same_features(a: KeyedJaggedTensor, b: KeyedJaggedTensor) -> bool:
    return KJTSnapshot(a).matches(b)


def rewrapped(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return features.to(torch.device("cpu"))
