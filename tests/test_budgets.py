"""The size of the package: its lines, files, options, top-level modules and hard words may not grow without a reason.

Lower a budget when the package has become smaller. State the reason in the commit message when you raise one.
"""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest

from lightning_freescale import (
    BalanceOptions,
    BubbleProfiler,
    FreeScaleDataModule,
    FreeScaleFabricStrategy,
    FreeScaleStrategy,
)
from lightning_freescale.comm import ProcessGroupFreeScaleOptions

PACKAGE = Path(__file__).parents[1] / "lightning_freescale"
FILES = sorted(PACKAGE.rglob("*.py"))
violations = runpy.run_path(str(PACKAGE.parent / "scripts" / "plain_english.py"))["violations"]

BUDGETS = {
    "lines": 37_400,
    "files": 209,
    "lines of the longest file": 400,
    "modules at the top level": 6,
    "options": 42,
    "words and beginnings to avoid": 0,
}
OPTIONS: dict[type, list[str]] = {
    FreeScaleStrategy: [
        "plan",
        "transport",
        "overlap",
        "dedup",
        "ids_of",
        "shard",
        "split_backward",
        "hot_rows",
        "rerank_every_n_steps",
        "wire",
        "target_bubble_reduction",
        "checkpoint",
    ],
    FreeScaleDataModule: [
        "train_dataset",
        "lengths",
        "batch_size",
        "cost",
        "collate_fn",
        "val_dataset",
        "test_dataset",
        "predict_dataset",
        "balance",
        "loss_reduction",
        "target_counts",
        "batch_tokens",
        "micro_batches",
        "drop_last",
        "shuffle",
        "seed",
    ],
    BalanceOptions: ["assignment_mode", "max_tokens_per_rank", "tokens", "padding"],
    BubbleProfiler: ["dirpath", "every_n_steps", "trace_steps", "torch_profiler_steps", "lengths_fn", "verbose"],
    ProcessGroupFreeScaleOptions: ["transport", "name", "priority", "chunk_bytes"],
}
"""All public options. Remove one before you add another; raise the budget only with a reason in the commit message."""
FABRIC_ONLY = ["clip_gradients"]
"""Options of the strategy for Fabric that the strategy for the Trainer does not have."""


def options_of(owner: type) -> list[str]:
    """The names of the arguments of a class, without those that it passes on."""
    parameters = inspect.signature(owner).parameters.values()
    return [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]


def measured() -> dict[str, int]:
    texts = {path: path.read_text() for path in FILES}
    lines = {path: text.count("\n") for path, text in texts.items()}
    return {
        "lines": sum(lines.values()),
        "files": len(FILES),
        "lines of the longest file": max(lines.values()),
        "modules at the top level": sum(path.parent == PACKAGE and path.name != "__init__.py" for path in FILES),
        "options": sum(len(options_of(owner)) for owner in OPTIONS),
        "words and beginnings to avoid": sum(len(list(violations(path))) for path in FILES),
    }


@pytest.mark.parametrize("name", BUDGETS)
def test_package_stays_within_its_budget(name: str) -> None:
    found = measured()[name]
    assert found <= BUDGETS[name], (
        f"{name}: {found} instead of at most {BUDGETS[name]}. Remove code, or raise the budget and say why."
    )


@pytest.mark.parametrize("owner", OPTIONS, ids=lambda owner: owner.__name__)
def test_options_are_those_listed(owner: type) -> None:
    assert options_of(owner) == OPTIONS[owner], f"{owner.__name__}: remove an option before you add one, and change this list."


def test_fabric_has_no_options_of_its_own() -> None:
    assert [name for name in options_of(FreeScaleFabricStrategy) if name not in OPTIONS[FreeScaleStrategy]] == FABRIC_ONLY
