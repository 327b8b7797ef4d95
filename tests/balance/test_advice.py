"""Advice: a sentence where no assignment helps, none where all is well."""

from __future__ import annotations

import numpy as np

from lightning_freescale.balance import advise

LENGTHS = np.random.RandomState(0).lognormal(3.5, 1.3, 3000).clip(1, 800)
COSTS = LENGTHS**2 + 100 * LENGTHS


def test_advice_names_what_would_help() -> None:
    sentence = advise(COSTS, 16, 8, lengths=LENGTHS)
    assert sentence is not None
    assert sentence.startswith("No assignment of these steps gets below")
    cap = LENGTHS[np.percentile(COSTS, 99, method="lower") >= COSTS].max()
    for remedy in (
        f"99th percentile (L = {cap:g})",
        "outlier_window=16",
        "batch_size=16",
        'assignment_mode="slack"',
        "on 8 ranks",
    ):
        assert remedy in sentence
    assert advise(np.ones(1000), 16, 8) is None


def test_advice_when_nothing_helps() -> None:
    """One sample in a hundred is everything; pooling, batches and slack cannot split it."""
    sentence = advise(np.array([1.0] * 30 + [1e9]), 2, 1, assignment_mode="free")
    assert sentence is None or "Predicted instead" in sentence or "would have to be split" in sentence
