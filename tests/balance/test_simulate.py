"""The what-if table: its files, its figures and what it refuses."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_freescale.balance import BalancedSampler, Budget, CostModel, assign
from lightning_freescale.balance.__main__ import main
from lightning_freescale.balance.assign import contiguous_split, imbalance
from lightning_freescale.balance.epoch_order import draw_order
from lightning_freescale.balance.simulation.forecast import Forecast, forecast, new_figure, plot
from lightning_freescale.balance.simulation.lengths import read_lengths

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


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.txt", b"", None, "no length: pass a file with at least one"),
        ("a.txt", b"3\n\n4\nfive\n", None, "line 4: 'five' is no number"),
        ("a.txt", b"0 12 13\n", None, "line 1: '0 12 13' is no number; write one length per line"),
        ("a.txt", b"3\n-4\n", None, r"a\.txt, lengths\[1\] is -4\.0"),
        ("a.txt", b"3\nnan\n", None, r"a\.txt, lengths\[1\] is nan"),
        ("a.txt.gz", b"3\n4\n", None, "cannot be read"),
        ("a.txt.gz", gzip.compress(b"3\n" * 999, mtime=0)[:-9], None, "cannot be read"),
        ("a.txt", b"\xff\xfe3\n", None, "cannot be read"),
        ("a.parquet", b"", None, "unknown suffix '.parquet'"),
        ("a.npy.gz", b"", None, "unknown suffix '.npy.gz'"),
        ("a.npy", b"3\n4\n", None, "holds no array of numbers"),
        ("a.npz", b"PK\x03\x04", None, "cannot be read"),
        ("a.csv", b"user,item\n1,2\n", None, "needs the name of the column"),
        ("a.txt", b"3\n", "user", "needs the name of the column"),
        ("a.csv", b"user,item\n1,2\n", "userId", r"no column 'userId', only \['user', 'item'\]"),
        ("a.csv", b"user,item\n1,2\n\n", "user", "line 3: no value for column 'user'"),
        ("a.csv", b"user,item\n1,2\n,2\n", "user", "line 3: no value for column 'user'"),
        ("a.csv", b"user,item\n", "user", "no length"),
    ],
)
def test_bad_files_are_refused(name: str, content: bytes, column: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_lengths(tmp_path / name, column)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"users": np.zeros(3)}, r"holds \['users'\]: name the array 'lengths' or 'offsets'"),
        ({"lengths": np.zeros((2, 2))}, r"shape \(2, 2\)"),
        ({"lengths": np.array(["3", "4"])}, "holds <U1"),
        ({"lengths": np.array([3, None])}, "holds no array of numbers"),
        ({"offsets": np.array([0, 5, 3], dtype=np.uint16)}, r"a\.npz, lengths\[1\] is -2\.0"),
        ({"offsets": np.array([0])}, "no length"),
    ],
)
def test_bad_arrays_are_refused(arrays: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_lengths(tmp_path / "a.npz")
    with pytest.raises(FileNotFoundError, match=r"b\.txt does not exist"):
        read_lengths(tmp_path / "b.txt")


def test_figures_are_those_of_the_assignment() -> None:
    """One step that has every sample once: everything but as drawn is known without drawing."""
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


def test_options_reach_the_assignment() -> None:
    lengths = np.array([100.0] * 4 + [1.0] * 28)  # equal counts leave ranks with cheap samples only
    fixed, slack, free = (
        forecast(lengths, 8, 4, steps=1, **options)
        for options in ({}, {"assignment_mode": "slack", "count_slack": 1.5}, {"assignment_mode": "free"})
    )
    assert free.balanced <= slack.balanced < fixed.balanced
    assert 'assignment_mode="slack"' in str(fixed.advice)


def test_a_window_changes_what_is_balanced_but_not_as_drawn() -> None:
    lengths = np.concatenate([np.full(8, 3000.0), np.full(8 * 63, 10.0)])
    plain, pooled = (forecast(lengths, 8, 4, steps=16, outlier_window=window) for window in (1, 16))
    assert pooled.balanced < plain.balanced and pooled.dominated < plain.dominated
    assert (pooled.unbalanced, pooled.zigzag) == (plain.unbalanced, plain.zigzag)


def test_a_dominated_step_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "figures.json"
    main(_line(_file(tmp_path, "outlier.txt", OUTLIER), "--ranks", "2,8", "--steps", "2", "--json", written))
    out = capsys.readouterr().out
    assert "64 samples; lengths: mean 157.2, median 1, p99 3701, max 10000" in out
    assert "predicted, not measured: at least 2 steps of 8 samples per rank, drawn from outlier.txt; cost 320 L + 1 L²" in out
    assert "8 ranks: No assignment of these steps at equal counts gets below" in out and "one sample costs more" in out
    figures = json.loads(written.read_text())
    assert [row["ranks"] for row in figures["predicted"]] == [2, 8] and "outlier.txt" in figures["predicted_from"]
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["8"])
    known = figures["predicted"][1]
    assert row[1:5] == [f"{known[name]:.3f}" for name in ("unbalanced", "zigzag", "balanced", "lower_bound")]
    idle = [f"{1 - 1 / known[name]:.1%}" for name in ("unbalanced", "balanced")]
    assert row[5:9] == [*idle, "100%", "1.00x"] and known["unbalanced"] > 7.9


def test_a_data_set_smaller_than_a_step_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With advice and without; the figures are those of the real step."""
    written = tmp_path / "figures.json"
    path = _file(tmp_path, "a.txt")
    main(_line(path, "--ranks", "30,64,200", "--batch-size", "8", "--steps", "2", "--json", written, "--dim", "8"))
    out = capsys.readouterr().out
    assert "\n30 ranks: a step" not in out
    for ranks, samples, each in ((64, 512, "4 or 5"), (200, 1600, "1 or 2")):
        told = (
            f"A step of {ranks} x 8 has {samples} samples, the data set only has 300: every step has all 300, {each} per rank."
        )
        assert f"\n{ranks} ranks: {told}" in out
    figures = {row["ranks"]: row for row in json.loads(written.read_text())["predicted"]}
    assert [figures[ranks]["samples_per_step"] for ranks in (30, 64, 200)] == [240, 300, 300]
    costs = CostModel.from_config(8)(LENGTHS)
    assert figures[200]["balanced"] == pytest.approx(assign(costs, 200).imbalance)
    main(_line(_file(tmp_path, "even.txt", np.full(60, 9)), "--ranks", "10", "--steps", "2"))
    assert "\n10 ranks: A step of 10 x 8 has 80 samples, the data set only has 60: every step has all 60, 6 per rank.\n" in (
        capsys.readouterr().out
    )


def test_a_budget_of_tokens_instead_of_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "figures.json"
    line = ["simulate", "--lengths", str(_file(tmp_path, "a.txt")), "--ranks", "2,4", "--batch-tokens", "500"]
    main([*line, "--json", str(written), "--plot", str(tmp_path / "a.png")])
    out = capsys.readouterr().out
    assert "of at most 500 tokens per rank, drawn from a.txt" in out and "assignment_mode free" in out
    for row in json.loads(written.read_text())["predicted"]:
        sampler = BalancedSampler(CostModel()(LENGTHS), Budget(500, LENGTHS), num_replicas=row["ranks"], rank=0)
        assert row["fill"] == sampler.fill and row["zigzag"] is None
        samples = max(len(sampler.global_batch(0, step)) for step in range(len(sampler)))
        assert f"{row['ranks']} ranks: Steps of up to {samples} samples, which use {row['fill']:.1%} of the tokens" in out
    with pytest.raises(SystemExit):
        main([*line, "--batch-size", "8"])
    assert "not allowed with" in capsys.readouterr().err


def test_more_ranks_than_samples_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(_line(_file(tmp_path, "a.txt"), "--ranks", "8,301"))
    assert "300 samples for 301 ranks: every rank needs at least one" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["fixed", "slack", "free"])
def test_a_bound_is_told_with_the_counts_it_holds_for(mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(_line(_file(tmp_path, "outlier.txt", OUTLIER), "--ranks", "8", "--steps", "2", "--assignment-mode", mode))
    counts = {"fixed": "at equal counts", "slack": "at counts up to 1.25 times equal", "free": "at any counts"}[mode]
    out = capsys.readouterr().out
    assert f"lower bound: no assignment of these steps {counts} gets below it\n" in out
    assert f"8 ranks: No assignment of these steps {counts} gets below" in out and ".." not in out


def test_nothing_is_advised_where_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(_line(_file(tmp_path, "even.txt", np.full(64, 9)), "--ranks", "2", "--dim", "8", "--layers", "2", "--heads", "2"))
    out = capsys.readouterr().out
    assert "No assignment" not in out and "cost 640 L + 16 L²" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "8,x"], "'x' is not a whole number >= 1"),
        (["--ranks", "0"], "'0' is not a whole number >= 1"),
        (["--ranks", "8,"], "'' is not a whole number >= 1"),
        (["--ranks", "2", "--batch-size", "-1"], "'-1' is not a whole number >= 1"),
        (["--ranks", "2", "--steps", "0"], "'0' is not a whole number >= 1"),
        (["--ranks", "2", "--heads", "2"], "--heads without --dim"),
        (["--ranks", "2", "--dim", "9", "--heads", "2"], "2 heads cannot share 9"),
        (["--ranks", "2", "--count-slack", "0.5"], "it is for --assignment-mode slack"),
        (["--ranks", "2", "--assignment-mode", "slack", "--count-slack", "-1"], "count_slack=-1.0"),
        (["--ranks", "2", "--column", "user"], "needs the name of the column"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(_line(_file(tmp_path, "a.txt"), *flags))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "imbalance.png"
    main(_line(_file(tmp_path, "a.txt"), "--ranks", "2,4", "--steps", "2", "--plot", path))
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("top", [1.0, 1.004, 1.3, 2.4, 7.0, 26.0, 900.0])
def test_no_share_below_zero_is_marked(top: float, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure, rows = new_figure(), [Forecast(ranks, 8, top, top, 1.0, 1.0, 0.0, 1.0, None) for ranks in (2, 8)]
    plot(figure, rows, tmp_path / "p.png", "predicted", "at any counts")
    (axes,) = figure.axes
    (right,) = axes.child_axes
    bottom, height = axes.get_ylim()[0], np.ptp(axes.get_ylim())
    marked = 100 / (100 - np.array(right.get_yticks()))
    assert right.get_yticks()[0] == 0 and bottom == 1 and marked[-1] <= axes.get_ylim()[1]
    assert (np.diff(marked) > 0.05 * height).all(), "labels would overlap"
    assert len(marked) > 2
    assert "lower bound at any counts" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_missing_matplotlib_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        main(_line(tmp_path / "no_such_file.txt", "--ranks", "2", "--plot", tmp_path / "p.png"))
    assert "pip install 'lightning-freescale[plot]'" in capsys.readouterr().err


@pytest.mark.slow
def test_command_without_torchrec_or_lightning(tmp_path: Path) -> None:
    block = "import sys, runpy, importlib.util as u; found = u.find_spec; hidden = ('lightning', 'torchrec', 'fbgemm_gpu')\n"
    block += "u.find_spec = lambda name, *a: None if name in hidden else found(name, *a)\n"
    block += "sys.modules.update({name: None for name in hidden})\n"
    code = block + "runpy.run_module('lightning_freescale.balance', run_name='__main__')"
    helped = _python(code)
    assert "usage: python -m lightning_freescale.balance" in helped and "simulate" in helped
    assert "predicted" in _python(code, *_line(_file(tmp_path, "a.npy"), "--ranks", "2", "--steps", "1"))


def _line(path: Path, *flags: object) -> list[str]:
    batch = [] if "--batch-size" in flags else ["--batch-size", "8"]
    return ["simulate", "--lengths", str(path), *batch, *map(str, flags)]


def _python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
