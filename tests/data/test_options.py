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


def test_steps_cut_by_tokens_or_cost(tmp_path: Any) -> None:
    """The two training histories have 3 and 2 tokens."""
    for text, steps in (("batch_tokens: 4", 1), ("batch_cost: 10000", 1)):
        data = _from_yaml(text, tmp_path)
        assert len(data.sampler(0, 2)) == steps and data.train.assignment_mode == "free"
    assert len(_from_yaml("batch_tokens: 4", tmp_path).sampler(0, 1)) == 2
    assert _from_yaml("batch_tokens: 4, micro_batches: auto", tmp_path).train.micro_batches.candidates == [1, 2, 4, 8]


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
        ("balance: {assignment_mode: zigzag, window: true}", "window=True.* has no meaning for assignment_mode='zigzag'"),
        (
            "balance: {assignment_mode: zigzag, rank_speeds: [1.0, 0.5]}",
            "rank_speeds=.* has no meaning for assignment_mode='zig",
        ),
        ("balance: {tokens: [3, 4]}, batch_cost: 1000000000", "tokens=.* has no meaning for batch_cost="),
        ("balance: {count_slack: 0.5}", "count_slack=.* has no meaning for assignment_mode='fixed'"),
        ("batch_tokens: 2", "sample 0 alone has 3"),
        ("batch_tokens: -1", r"Budget\(per_rank=-1.*pass a finite number > 0"),
        ("batch_tokens: 9, batch_cost: 9", "pass one of them"),
        ("batch_tokens: 9, drop_last: true", "drop_last=.* has no meaning for batch_tokens="),
        ("batch_tokens: 9, balance: false", "balance=False.* has no meaning for batch_tokens="),
        ("batch_tokens: 9, balance: {assignment_mode: fixed}", "assignment_mode=.* has no meaning for batch_tokens="),
        ("batch_tokens: 9, balance: {window: true}", "window=.* has no meaning for batch_tokens="),
        ("batch_tokens: 9, balance: {max_tokens_per_rank: 9}", "max_tokens_per_rank=.* has no meaning for batch_tokens="),
        ("batch_tokens: 9, micro_batches: 9", "from 1 to 8, as the number of samples is not given"),
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
