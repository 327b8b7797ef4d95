"""Plans of steps under the strategy: ranks agree on them, and their balance is logged with advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.loggers import Logger

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale._lightning.profiler import ProfilerCallback
from lightning_freescale.balance import BalanceReport, predict
from lightning_freescale.data import BalanceOptions
from lightning_freescale.strategy import balance_monitor
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import REPEATS, Recommender, Samples, collate, trainer


class LogsAll(ProfilerCallback):
    verbose = True


class Kept(Logger):
    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int, dict[str, float]]] = []

    @property
    def experiment(self) -> Any:
        return self

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((step or 0, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def of(self, prefix: str) -> list[dict[str, float]]:
        return [m for _, m in self.metrics if any(name.startswith(prefix) for name in m)]


def _plan_differently() -> None:
    data = Samples(16)
    module = FreeScaleDataModule(data, data.lengths + dist.get_rank(), 2, collate_fn=collate)
    with pytest.raises(RuntimeError, match=r"ranks \[1\].*lengths"):
        trainer(devices=2).fit(Recommender(), module)


def test_ranks_that_plan_differently_are_stopped() -> None:
    run_distributed(_plan_differently, 2)


def _logged(folder: str) -> tuple[list[list[dict[str, float]]], float]:
    """Fit without a profiler, with one, and with a verbose one. Return what is logged, and the balance of the second epoch."""
    data, loggers = Samples(40), []
    profilers = [BubbleProfiler(folder, every_n_steps=5, verbose=each) for each in (None, True)]
    for callbacks in ([], profilers[:1], profilers[1:]):
        module = FreeScaleDataModule(data, data.lengths, 2, collate_fn=collate, **REPEATS)
        loggers.append(Kept())
        options: dict[str, Any] = {"max_epochs": 2, "logger": loggers[-1], "log_every_n_steps": 5, "callbacks": callbacks}
        trainer(devices=2, **options).fit(Recommender(), module)
    return [each.of("freescale/") for each in loggers], module.sampler(0, 2).report(1).balanced


def test_loggers_receive_four_series_and_the_others_if_verbose(tmp_path: Path) -> None:
    (logged, after), (nothing, _) = run_distributed(_logged, 2, str(tmp_path))
    assert nothing == [[], [], []]
    exchange = {"freescale/overlap/exposed_s", "freescale/overlap/hidden_s"}
    plain, profiled, everything = ({name for metrics in each for name in metrics} for each in logged)
    assert plain == {"freescale/imbalance/epoch/balanced"} | exchange
    measured = {"freescale/bubble/fraction", "freescale/bubble/compute_imbalance"}
    assert profiled == measured | exchange
    steps, epochs = ([each for each in logged[-1] if f"freescale/imbalance/{over}/gap" in each] for over in ("step", "epoch"))
    assert everything > measured | exchange | {"freescale/bubble/step_s", "freescale/overlap/rows"}
    assert len(steps) == 4 and len(epochs) == 2, "20 steps, every fifth is logged"
    names = {"unbalanced", "balanced", "lower_bound", "gap", "dominated", "tokens_imbalance", "tokens_unbalanced"}
    assert {name.rsplit("/")[-1] for name in epochs[0]} == names == {name.rsplit("/")[-1] for name in steps[0]}
    assert epochs[1]["freescale/imbalance/epoch/balanced"] == pytest.approx(after)
    assert epochs[1]["freescale/imbalance/epoch/unbalanced"] > after


def _advised() -> list[list[tuple[BalanceReport, BalanceReport]]]:
    """Return for each fit what each advice was asked about, and what is predicted with what it was given."""
    asked: list[tuple[BalanceReport, BalanceReport]] = []

    def advise(costs: Any, ranks: int, batch_size: int, report: BalanceReport, lengths: Any, **options: Any) -> None:
        asked.append((report, predict(costs, ranks, batch_size, steps=report.steps, **options)))

    balance_monitor.advise = advise  # this process ends with the test
    data, found = Samples(43), []
    limits = {"max_tokens_per_rank": float(data.lengths.max() * 3)}
    for drop_last, options in ((False, {}), (True, {}), (True, {"assignment_mode": "free", **limits})):
        given: dict[str, Any] = {"collate_fn": collate, "drop_last": drop_last, "balance": BalanceOptions(**options)}
        trainer(devices=2, max_epochs=1).fit(Recommender(), FreeScaleDataModule(data, data.lengths, 2, seed=5, **given))
        found.append(list(asked))
        asked.clear()
    return found


def test_advice_is_on_the_epochs_own_steps_and_limits() -> None:
    asked, nothing = run_distributed(_advised, 2)
    assert nothing == [[], [], []]
    for ((report, predicted),), steps in zip(asked, (11, 10, None)):
        assert steps in (report.steps, None) and predicted.steps == report.steps
        assert predicted.unbalanced == pytest.approx(report.unbalanced)
        assert predicted.lower_bound == pytest.approx(report.lower_bound)
    assert report.tokens_fullest is not None and predicted.tokens_fullest == pytest.approx(report.tokens_fullest)
    assert predicted.balanced == pytest.approx(report.balanced)


def _advised_on_two_modes() -> list[tuple[BalanceReport | None, str]]:
    """Return the report and the mode of the advice on a fit that begins at equal counts and goes on at others."""
    asked: list[tuple[BalanceReport | None, str]] = []

    def advise(*args: Any, assignment_mode: str, **options: Any) -> None:
        asked.append((args[3], assignment_mode))

    balance_monitor.advise = advise  # this process ends with the test
    data, cost = Samples(160), [30.0 if each % 12 == 0 else 1.0 for each in range(160)]
    module = FreeScaleDataModule(data, data.lengths, 8, collate_fn=collate, cost=cost)
    trainer(devices=2, max_epochs=1).fit(Recommender(), module)
    return asked


def test_a_report_of_two_modes_is_not_compared_with_a_forecast_of_one() -> None:
    asked, nothing = run_distributed(_advised_on_two_modes, 2)
    assert (asked, nothing) == ([(None, "slack")], [])
