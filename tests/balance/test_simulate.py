"""The table of ``simulate``: its input files, figures and errors."""

from __future__ import annotations

import gzip
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, Budget, CostModel, assign
from lightning_freescale.balance.assign import contiguous_split, imbalance
from lightning_freescale.balance.global_batches import draw_order
from lightning_freescale.balance.simulate import forecast, read_lengths, summarize_lengths
from lightning_freescale.command_line.simulate import run

main = partial(run, "simulate")
LENGTHS = np.random.RandomState(0).lognormal(3, 1, 300).astype(int) + 1
OUTLIER = np.array([1] * 63 + [10_000])


def _file(tmp_path: Path, name: str, lengths: np.ndarray = LENGTHS) -> Path:
    path = tmp_path / name
    text = "".join(f"{length}\n" for length in lengths)
    rows = "userId,item\n" + "".join(f"u{user},{i}\n" for user, length in enumerate(lengths) for i in range(length))
    if name.endswith(".npy"):
        np.save(path, lengths)
    elif name.endswith(".npz"):
        arrays = {"lengths": lengths} if "lengths" in name else {"offsets": np.append(0, np.cumsum(lengths)).astype(np.uint32)}
        np.savez(path, **arrays, other=np.zeros(3))
    else:
        content = (rows if ".csv" in name else text).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize(
    "name", ["a.txt", "a", "a.txt.gz", "a.gz", "a.npy", "lengths.npz", "offsets.npz", "a.csv", "a.csv.gz", "data.v2.txt"]
)
def test_every_kind_of_file_holds_the_same_lengths(name: str, tmp_path: Path) -> None:
    read = read_lengths(_file(tmp_path, name), "userId" if ".csv" in name else None)
    np.testing.assert_array_equal(read, LENGTHS)
    assert read.dtype == np.float64


ROWS = b"user,item\n1,2\n"


@pytest.mark.parametrize(
    ("name", "content", "column", "facts"),
    [
        ("a.txt", b"", None, "a.txt"),
        ("a.txt", b"3\n\n4\nfive\n", None, "line 4: 'five'"),
        ("a.txt", b"0 12 13\n", None, "line 1: '0 12 13'"),
        ("a.txt", b"3\n-4\n", None, "lengths[1] is -4.0"),
        ("a.txt", b"3\nnan\n", None, "lengths[1] is nan"),
        ("a.txt.gz", b"3\n4\n", None, "a.txt.gz"),
        ("a.txt.gz", gzip.compress(b"3\n" * 999, mtime=0)[:-9], None, "a.txt.gz"),
        ("a.txt", b"\xff\xfe3\n", None, "a.txt"),
        ("a.parquet", b"", None, "suffix '.parquet'"),
        ("a.npy.gz", b"", None, "suffix '.npy.gz'"),
        ("a.npy", b"3\n4\n", None, "a.npy"),
        ("a.npz", b"PK\x03\x04", None, "a.npz"),
        ("a.csv", ROWS, None, "--column None: the columns are ['user', 'item']"),
        ("a.txt", b"3\n", "user", "--column 'user'"),
        ("a.csv", ROWS, "userId", "'userId': the columns are ['user', 'item']"),
        ("a.csv", ROWS + b"\n", "user", "line 3"),
        ("a.csv", ROWS + b",2\n", "user", "line 3"),
        ("a.csv", b"user,item\n", "user", "a.csv"),
        ("a.npz", {"users": np.zeros(3)}, None, "['users']"),
        ("a.npz", {"lengths": np.zeros((2, 2))}, None, "(2, 2)"),
        ("a.npz", {"lengths": np.array(["3", "4"])}, None, "<U1"),
        ("a.npz", {"lengths": np.array([3, None])}, None, "a.npz"),
        ("a.npz", {"offsets": np.array([0, 5, 3], dtype=np.uint16)}, None, "lengths[1] is -2.0"),
        ("a.npz", {"offsets": np.array([0])}, None, "a.npz"),
    ],
)
def test_bad_files_are_refused(
    name: str, content: bytes | dict[str, np.ndarray], column: str | None, facts: str, tmp_path: Path
) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        np.savez(tmp_path / name, **content)
    with pytest.raises(ValueError, match=re.escape(facts)):
        read_lengths(tmp_path / name, column)
    with pytest.raises(FileNotFoundError, match=r"b\.txt"):
        read_lengths(tmp_path / "b.txt")


def test_figures_are_those_of_the_assignment() -> None:
    """A step of all samples has known figures, except for those as drawn."""
    cost = CostModel.from_config(16)
    row = forecast(LENGTHS, 10, 30, cost, steps=1, seed=3)
    costs = cost(LENGTHS)
    best, drawn = assign(costs, 10), draw_order(300, seed=3, epoch=0)
    assert row.balanced == pytest.approx(best.imbalance) and row.lower_bound == pytest.approx(best.lower_bound)
    assert row.zigzag == pytest.approx(assign(costs, 10, assignment_mode="zigzag").imbalance)
    assert row.unbalanced == pytest.approx(imbalance(costs[drawn], contiguous_split(300, 10), 10))
    assert row.speedup == pytest.approx(row.unbalanced / row.balanced)
    assert row.lower_bound < row.balanced < row.zigzag < row.unbalanced
    assert row.dominated == 0 and row.advice is None and row.samples_per_step == 300


def test_options_change_what_is_balanced_but_not_as_drawn() -> None:
    lengths = np.array([100.0] * 4 + [1.0] * 28)  # equal counts leave some ranks with cheap samples only
    options = {}, {"assignment_mode": "slack"}, {"assignment_mode": "free"}
    fixed, slack, free = (forecast(lengths, 8, 4, steps=1, **each) for each in options)
    assert free.balanced <= slack.balanced < fixed.balanced and free.unbalanced == fixed.unbalanced


def test_a_dominated_step_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "figures.json"
    main(_line(_file(tmp_path, "outlier.txt", OUTLIER), "--ranks", "2,8", "--steps", "2", "--json", written))
    out = capsys.readouterr().out
    assert all(fact in out for fact in ("64 samples", "mean 157.2", "median 1,", "p99 3701", "max 10000", "320 L + 1 L²"))
    assert "\n8 ranks: " in out and "\n2 ranks: " in out, "advice"
    figures = json.loads(written.read_text())
    assert [row["ranks"] for row in figures["predicted"]] == [2, 8] and "outlier.txt" in figures["predicted_from"]
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["8"])
    known = figures["predicted"][1]
    assert row[1:5] == [f"{known[name]:.3f}" for name in ("unbalanced", "zigzag", "balanced", "lower_bound")]
    idle = [f"{1 - 1 / known[name]:.1%}" for name in ("unbalanced", "balanced")]
    assert row[5:9] == [*idle, "100%", "1.00x"] and known["unbalanced"] > 7.9


def test_a_data_set_smaller_than_a_step_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "figures.json"
    main(_line(_file(tmp_path, "a.txt"), "--ranks", "30,64,200", "--steps", "2", "--json", written, "--dim", "8"))
    printed = {text.partition(" ranks: ")[0]: text for text in capsys.readouterr().out.split("\n\n")}
    assert "512 samples" in printed["64"] and "1600 samples" in printed["200"] and "1 or 2 per rank" in printed["200"]
    figures = {row["ranks"]: row for row in json.loads(written.read_text())["predicted"]}
    assert [figures[ranks]["samples_per_step"] for ranks in (30, 64, 200)] == [240, 300, 300]
    assert figures[200]["balanced"] == pytest.approx(assign(CostModel.from_config(8)(LENGTHS), 200).imbalance)
    main(_line(_file(tmp_path, "even.txt", np.full(64, 9)), "--ranks", "2", "--dim", "8", "--layers", "2", "--heads", "2"))
    out = capsys.readouterr().out
    assert "2 ranks: " not in out and "cost 640 L + 16 L²" in out


def test_a_budget_of_tokens_instead_of_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "figures.json"
    line = ["--lengths", str(_file(tmp_path, "a.txt")), "--ranks", "2,4", "--batch-tokens", "500"]
    main([*line, "--json", str(written)])
    out = capsys.readouterr().out
    assert "500 tokens per rank" in out and "assignment_mode free" in out
    for row in json.loads(written.read_text())["predicted"]:
        sampler = BalancedSampler(CostModel()(LENGTHS), Budget(500, LENGTHS), num_replicas=row["ranks"], rank=0)
        assert row["fill"] == sampler.batches.fill and row["zigzag"] is None
        samples = max(len(sampler.global_batch(0, step)) for step in range(len(sampler)))
        printed = out.partition(f"\n{row['ranks']} ranks: ")[2]
        assert row["samples_per_step"] == samples and f"{samples} samples" in printed and f"{row['fill']:.1%}" in printed
    with pytest.raises(SystemExit):
        main([*line, "--batch-size", "8"])
    assert "--batch-size" in capsys.readouterr().err


def test_padded_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, figures = _file(tmp_path, "a.txt"), []
    for parts in ("1", "4"):
        flags = ["--padded", "--max-length", "60", "--micro-batches", parts, "--json", str(tmp_path / "out.json")]
        main(["--lengths", str(path), "--ranks", "4", "--batch-size", "16", *flags])
        figures += json.loads((tmp_path / "out.json").read_text())["predicted"]
    printed = capsys.readouterr().out
    assert (
        "max 60" in printed
        and "assignment_mode free, padded to the longest sample of a micro-batch, 4 micro-batches" in printed
    )
    assert (
        "slowest rank with padding" in printed
        and "of the computed tokens are padding as drawn" in printed
        and "With micro_batches=" in printed
    )
    one, four = figures
    cost = CostModel()(np.minimum(LENGTHS, 60))
    drawn = [cost[draw_order(300, 0, 0)][64 * step :][:64].reshape(4, 16) for step in range(4)]
    expected = [16 * step.max(axis=1).max() / (step.sum() / 4) for step in drawn]
    assert one["unbalanced"] == four["unbalanced"] == pytest.approx(np.mean(expected), rel=0.05)
    assert four["balanced"] < one["balanced"] < 0.9 * one["unbalanced"] and four["padding"] < one["padding"]


@pytest.mark.parametrize("longest", [0, 1, 7, 200, 10**6])
def test_64_numbers_keep_what_lengths_cost(longest: int) -> None:
    lengths = np.sort(np.minimum(np.random.default_rng(0).lognormal(4, 2, 20_000).round(), longest))
    groups = summarize_lengths(lengths)
    again = np.repeat(groups["values"], groups["counts"])
    assert len(groups["values"]) == len(groups["counts"]) <= 32 and len(again) == len(lengths) and again.max() == lengths.max()
    sums, known = (CostModel(1.0, 320.0, 1.0)(each).sum() for each in (again, lengths))
    assert again.sum() == pytest.approx(lengths.sum()) and sums == pytest.approx(known, rel=0.02)
    balance = [forecast(each, 16, 8, steps=4) for each in (again, lengths)]
    for name in ("unbalanced", "balanced"):
        assert getattr(balance[0], name) == pytest.approx(getattr(balance[1], name), rel=0.05), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "8,x"], "--ranks: 'x'"),
        (["--ranks", "0"], "--ranks: '0'"),
        (["--ranks", "8,"], "--ranks: ''"),
        (["--ranks", "8,301"], "300 samples for 301 ranks"),
        (["--ranks", "2", "--batch-size", "-1"], "--batch-size: '-1'"),
        (["--ranks", "2", "--steps", "0"], "--steps: '0'"),
        (["--ranks", "2", "--heads", "2"], "--heads without --dim"),
        (["--ranks", "2", "--dim", "9", "--heads", "2"], "dim=9, heads=2"),
        (["--ranks", "2", "--column", "user"], "--column 'user'"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(_line(_file(tmp_path, "a.txt"), *flags))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def _line(path: Path, *flags: object) -> list[str]:
    batch = [] if "--batch-size" in flags else ["--batch-size", "8"]
    return ["--lengths", str(path), *batch, *map(str, flags)]
