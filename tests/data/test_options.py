"""The data module's options in YAML."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from jsonargparse import ArgumentError, ArgumentParser, class_from_function

from lightning_freescale import FreeScaleDataModule

TABLE = pa.table({"user": [1] * 6 + [2] * 5, "item": [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0], "time": list(range(11))})
DATA_MODULE: Any = class_from_function(FreeScaleDataModule.from_interactions)


def _from_yaml(text: str, path: Any) -> FreeScaleDataModule:
    """What LightningCLI makes of a ``data:`` section."""
    pa.parquet.write_table(TABLE, path / "rows.parquet")
    parser: Any = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(DATA_MODULE, "data")
    config = parser.parse_string(f"data: {{source: {path / 'rows.parquet'}, {text}}}")
    return getattr(parser, "instantiate", parser.instantiate_classes)(config).data


def test_balance_options(tmp_path: Any) -> None:
    text = "balance: {assignment_mode: slack, count_slack: 0.5, tokens: [3, 4], rank_speeds: [1.0, 0.5]}"
    options = _from_yaml(text, tmp_path).balance_options
    assert (options.assignment_mode, options.count_slack, options.outlier_window) == ("slack", 0.5, 1)
    assert (options.tokens, options.rank_speeds) == ([3, 4], [1.0, 0.5])


@pytest.mark.parametrize("balance", [True, False])
def test_balance_as_a_switch(balance: bool, tmp_path: Any) -> None:
    data = _from_yaml(f"balance: {str(balance).lower()}, batch_size: 1", tmp_path)
    assert data.sampler(0, 2).balance_steps is balance


def test_options_of_torchs_loader(tmp_path: Any) -> None:
    loader = _from_yaml("num_workers: 2, prefetch_factor: 3, batch_size: 1", tmp_path).train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor) == (2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_worker: 2", "num_worker"),
        ("batch_sampler: 2", "batch_sampler"),
        ("generator: 2", "generator"),
        ("balance: {mode: slack}", "mode"),
        ("balance: {assignment_mode: slak}", "slak"),
        ("balance: {count_slack: 0.5}", "count_slack=.* has no meaning for assignment_mode='fixed'"),
        ("stream: {stream_balancing: local, pool: 3}", "pool"),
        ("stream: {stream_balancing: local}", "stream=.* has no meaning for a map-style data set"),
    ],
)
def test_what_does_not_fit_is_named(text: str, message: str, tmp_path: Any) -> None:
    with pytest.raises((ArgumentError, ValueError), match=message):
        _from_yaml(text, tmp_path)


def test_parquet_histories(tmp_path: Any) -> None:
    table = pa.table(
        {"user": [1, 2], "item": [[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0]], "time": [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5]]}
    )
    pa.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=1)
    parser: Any = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(class_from_function(FreeScaleDataModule.from_parquet), "data")
    text = f"data: {{source: {tmp_path}/*.parquet, row_group_window: 1, batch_size: 1, balance: {{assignment_mode: slack}}}}"
    config = parser.parse_string(text)
    data = getattr(parser, "instantiate", parser.instantiate_classes)(config).data
    assert data.sampler(0, 2).blocks.window == 1
    assert data.balance_options.assignment_mode == "slack"
