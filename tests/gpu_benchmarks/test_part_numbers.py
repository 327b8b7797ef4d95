"""The part that compares the strategy with plain TorchRec notices what differs, and says it at once."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import one_rank
import part_host_time
import part_model
import part_numbers
import pytest
import torch
from hour_report import Report, Skip
from one_rank_compare import bitwise, judge, relative
from one_rank_recommender import Run, Size
from part_numbers import Case
from torch import Tensor

from lightning_freescale._worker import WorkerThread
from lightning_freescale.testing import run_distributed

ALTERED = "adagrad, no dedup"
CHOSEN = [Case(ALTERED, "adagrad", {"dedup": False}), Case("sgd, dedup", "sgd", {}, 1e-5), Case("adam, dedup", "adam")]


def _found(out: Path, part: str = "numbers") -> dict[str, Any]:
    return json.loads((out / f"part_{part}.json").read_text())


def _ends(main: Callable[..., Any], out: Path, **options: Any) -> int:
    with pytest.raises(SystemExit) as end:
        main(["--out", str(out), "--quick"], **options)
    return int(end.value.code)


def _last_bit(run: Run) -> None:
    weight = next(iter(run.weights.values()))
    weight.view(torch.int32)[-1, -1] ^= 1


def _trained(out: Path, flips: bool) -> tuple[int, list[int]]:
    """The exit code, and how many rows were on disk before each comparison."""
    part_numbers.cases = lambda: CHOSEN
    rows = []

    def alter(name: str, run: Run) -> None:
        rows.append(len(_found(out)["rows"]))
        warnings.warn("my_sum does not have a deterministic implementation, but you set", stacklevel=1)
        if flips and name == ALTERED:
            _last_bit(run)

    return _ends(part_numbers.main, out, alter=alter), rows


@pytest.mark.slow
def test_one_bit_of_one_weight_fails_its_case_alone(tmp_path: Path) -> None:
    ((code, rows),) = run_distributed(_trained, 1, tmp_path, True)
    found = _found(tmp_path)
    assert code == 1
    assert rows == [0, 1, 2, 3], "a row is on disk before the next case is compared"
    assert [row["what"] for row in found["rows"] if not row["ok"]] == [ALTERED] == [one["what"] for one in found["failed"]]
    row = found["rows"][0]
    assert row["losses"] == 0 < row["largest"] < 1e-6 and not row["bitwise"]
    assert found["figures"] == {"cases": 4, "cases_ok": 3}
    assert (tmp_path / "part_numbers.md").read_text().startswith("## numbers")


@pytest.mark.slow
def test_all_is_equal_on_the_cpu(tmp_path: Path) -> None:
    ((code, _),) = run_distributed(_trained, 1, tmp_path, False)
    found = _found(tmp_path)
    assert code == 0 and not found["failed"]
    assert {row["what"] for row in found["rows"] if row["bitwise"]} >= {ALTERED, "rowwise_adagrad, resumed", "adam, resumed"}
    assert {"what": "adam, dedup", "why": part_numbers.NO_ADAM} in found["skipped"]
    assert {"what": "determinism", "why": "my_sum does not have a deterministic implementation"} in found["skipped"]
    assert [one["why"] for one in found["skipped"] if one["what"] == "sanitizer"] == [
        "no CUDA device, so no streams to put in order"
    ]


def test_every_optimizer_is_compared_in_every_way() -> None:
    made = {
        (case.optimizer, case.options.get("dedup", True), case.options.get("overlap", True)) for case in part_numbers.cases()
    }
    ways = [(False, True), (True, False), (True, True)]
    assert {(name, *way) for name in ("sgd", "adagrad", "rowwise_adagrad", "adam") for way in ways} == made
    assert all(case.tolerance == 0 for case in part_numbers.cases() if case.options)
    assert {case.precision for case in part_numbers.cases()} == {"32-true", "bf16-mixed"}
    assert any(case.validate for case in part_numbers.cases())


PARTS = [part_numbers.main, part_host_time.main, part_model.main]


@pytest.mark.parametrize("main", PARTS)
def test_a_package_that_is_not_there_is_a_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Callable[..., Any]
) -> None:
    monkeypatch.setattr(one_rank, "PACKAGES", ("torch", "no_such_package"))
    assert _ends(main, tmp_path) == 0
    (written,) = tmp_path.glob("part_*.json")
    found = json.loads(written.read_text())
    assert found["skipped"] == [{"what": "everything", "why": "no_such_package is not installed"}] and not found["failed"]


@pytest.mark.parametrize("main", PARTS)
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import ctypes; ctypes.CDLL('/no/such/library.so')", "OSError: /no/such/library.so: cannot open shared object file"),
        ("raise ImportError('undefined symbol: _ZN3c10')", "ImportError: undefined symbol: _ZN3c10"),
        ("import broken_package.left_out", "No module named 'broken_package.left_out'"),
        ("import no_such_dependency", "No module named 'no_such_dependency'"),
    ],
)
def test_a_package_that_is_there_and_does_not_load_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Callable[..., Any], source: str, error: str
) -> None:
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(one_rank, "PACKAGES", ("broken_package",))
    assert _ends(main, tmp_path / "out") == 1
    (written,) = (tmp_path / "out").glob("part_*.json")
    found = json.loads(written.read_text())
    (failed,) = found["failed"]
    assert failed["what"] == "everything" and error in failed["error"] and not found["skipped"]


def test_the_build_for_cpus_on_a_machine_with_a_gpu_is_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    one_rank.load()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Skip, match="fbgemm_gpu has no CUDA kernels"):
        one_rank.load()


def test_a_build_without_operators_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(one_rank, "_OPERATOR", "fbgemm::no_such_operator")
    with pytest.raises(RuntimeError, match="no_such_operator"):
        one_rank.load()


ONE = torch.tensor([[1.0, -2.0]])


@pytest.mark.parametrize(
    "other",
    [
        {"weight": torch.nextafter(ONE, 2 * ONE)},
        {"weight": ONE.double()},
        {"weight": ONE[0]},
        {"bias": ONE},
        {"weight": ONE, "bias": ONE},
        {},
    ],
)
def test_what_is_not_the_same_bits(other: dict[str, Tensor]) -> None:
    assert bitwise({"weight": ONE}, {"weight": ONE.clone()})
    assert not bitwise({"weight": ONE}, other)


def test_zeros_of_two_signs_differ_and_a_nan_is_itself() -> None:
    assert not bitwise({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(-0.0)})
    assert bitwise({"weight": torch.tensor(float("nan"))}, {"weight": torch.tensor(float("nan"))})


def test_difference_by_the_largest_number_of_its_tensor() -> None:
    small, large = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 100.0])
    off = {"a": small + torch.tensor([0.03, 0.01]), "b": large + 0.1}
    assert relative(off, {"a": small, "b": large}) == pytest.approx((0.03, 0.04))
    assert relative({"a": small}, {"a": 0 * small}) == (float("inf"),) * 2 == relative({"a": small / 0}, {"a": small})
    assert relative({"a": 0 * small}, {"a": 0 * small}) == (0.0, 0.0)
    with pytest.raises(ValueError, match=r"one has \['a'\] and the other \['b'\]"):
        relative({"a": small}, {"b": small})


@pytest.mark.parametrize(
    ("tolerance", "off", "ok"), [(0.0, 0.0, True), (0.0, 1e-6, False), (1e-5, 1e-6, True), (1e-5, 1e-4, False)]
)
@pytest.mark.parametrize("where", ["losses", "weights", "states"])
def test_what_is_within_its_tolerance(tmp_path: Path, tolerance: float, off: float, ok: bool, where: str) -> None:
    report = Report("numbers", tmp_path)
    run, expected = (Run([1.0, 0.5], {"w": torch.ones(2)}, {"s": torch.ones(2)}) for _ in range(2))
    if where == "losses":
        run.losses[1] *= 1 + off
    else:
        getattr(run, where)[where[0]] *= 1 + off
    judge(report, "case", "reference", run, expected, tolerance)
    assert _found(tmp_path)["rows"][0]["ok"] == ok == (not _found(tmp_path)["failed"])


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_infinite_differences_fail_once_and_in_words(tmp_path: Path, odd: float) -> None:
    run, expected = Run([1.0, odd], {"w": torch.tensor([1.0, odd])}), Run([1.0, 0.5], {"w": torch.ones(2)})
    judge(Report("numbers", tmp_path), "case", "reference", run, expected, 1e-5)
    text = (tmp_path / "part_numbers.json").read_text()
    assert "Infinity" not in text and "NaN" not in text
    (row,), (failed,) = _found(tmp_path)["rows"], _found(tmp_path)["failed"]
    assert (row["losses"], row["largest"], row["mean"], row["ok"]) == (None, None, None, False)
    assert "losses differ by inf, weights and states by up to inf" in failed["error"]


def test_losses_that_do_not_move_prove_nothing(tmp_path: Path) -> None:
    judge(Report("numbers", tmp_path), "case", "reference", Run([0.5, 0.5]), Run([0.5, 0.5]), 0.0)
    assert "does not move" in _found(tmp_path)["failed"][0]["error"]


# -- the sanitizer


def _sanitized(out: Path) -> list[Any]:
    report = Report("numbers", out)
    with one_rank.one_rank() as device:
        trials = part_numbers._Trials(device, Size(101, 8, 4, 6, 4), lambda name, run: None)
        for name, options in (("dedup", {}), ("no overlap, and so no dedup", {"overlap": False})):
            case = Case(name, "sgd", options)
            part_numbers.watch(report, name, lambda case=case: trials.fit(case), wanted=False, overlapped=True)
    return report.found()["rows"]


@pytest.mark.slow
def test_the_sanitizer_sees_the_engine_and_is_not_ok_where_it_does_not(tmp_path: Path) -> None:
    (rows,) = run_distributed(_sanitized, 1, tmp_path)
    assert rows[0]["ok"] and rows[0]["background"] > 100 and rows[0]["operators"] > rows[0]["background"] + 100
    assert not rows[1]["ok"] and rows[1]["background"] == 0


class _OnGPU(torch.Tensor):
    """On the CPU, but it says that it is on a GPU, as do views of it."""

    is_cuda = True


def _block(values: int) -> Tensor:
    return torch.ones(values).as_subclass(_OnGPU)


class _Streams:
    """What a sanitizer sees of operators on streams that do not exist."""

    def __init__(self) -> None:
        import one_rank_sanitizer  # in the processes that need it alone: it slows allocations down

        self._current, self._sanitizer = threading.local(), one_rank_sanitizer
        torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=self._current.stream)
        self.accesses = one_rank_sanitizer.Accesses()

    def add(self, stream: int, tensor: Tensor) -> None:
        """Write the tensor in place, inside of the package, on a stream."""
        arguments, self._current.stream, operator = self._sanitizer.Arguments(), stream, torch.ops.aten.add_.Tensor
        arguments.parse_inputs(operator._schema, (tensor, 1), {}, is_factory=False)
        WorkerThread("here").run(lambda: self.accesses.launched(operator, arguments)).result()


def _fire(name: str, *numbers: int) -> None:
    from one_rank_sanitizer import _CALLBACKS

    _CALLBACKS[f"_handle_{name}"].fire_callbacks(*numbers)


def _two_streams(ordered: bool) -> tuple[int, list[str], str]:
    streams, block = _Streams(), _block(4)
    streams.add(1, block)
    if ordered:
        _fire("event_record", 7, 1)
        _fire("event_wait", 7, 2)
    streams.add(2, block)
    return streams.accesses.unordered.total(), streams.accesses.told, streams.accesses.within


def test_the_sanitizer_finds_what_no_event_orders() -> None:
    ((count, told, within),) = run_distributed(_two_streams, 1, False, init=False)
    assert count == 1 and "CSAN detected a possible data race" in told[0]
    lines = within.splitlines()
    half = len(lines) // 2
    assert lines[0] == "later, on stream 2: aten::add_ writing to it, called at"
    assert lines[half] == "earlier, on stream 1: aten::add_ writing to it, called at"
    assert lines[1:half] == lines[half + 1 :] and all(line.startswith("  lightning_freescale/") for line in lines[1:half])
    assert lines[-1].startswith("  lightning_freescale/_worker.py:") and lines[-1].endswith(" in _attempt")
    assert run_distributed(_two_streams, 1, True, init=False) == [(0, [], "")]


def _used_again(freed: bool) -> int:
    """Unordered accesses to the middle of a block that one stream has written, and another gets."""
    streams, block = _Streams(), _block(8)
    _fire("memory_allocation", block.data_ptr())
    for part in (block, block[4:]):
        streams.add(1, part)
    if freed:
        _fire("memory_deallocation", block.data_ptr())
        _fire("memory_allocation", block.data_ptr())
    for part in (block, block[4:]):
        streams.add(2, part)
    return streams.accesses.unordered.total()


def test_the_sanitizer_forgets_all_of_a_block_that_is_freed() -> None:
    assert run_distributed(_used_again, 1, True, init=False) == [0]
    assert run_distributed(_used_again, 1, False, init=False) == [2]


def _nothing() -> int:
    streams, nothing = _Streams(), _block(0)
    for stream in (1, 2):
        streams.add(stream, nothing)
    return streams.accesses.unordered.total()


def test_the_sanitizer_leaves_out_what_has_no_elements() -> None:
    assert run_distributed(_nothing, 1, init=False) == [0]


def _watched(out: Path) -> list[dict[str, str]]:
    """What fails of two runs that are each in order, on the same memory but other streams, and of one that is not."""
    import one_rank_sanitizer

    report, block, streams = Report("numbers", out), _block(4), _Streams()

    class Kept(one_rank_sanitizer.Accesses):
        def __init__(self) -> None:
            super().__init__()
            streams.accesses = self

    def run(used: tuple[int, ...]) -> None:
        for stream in used:
            streams.add(stream, block)

    one_rank_sanitizer.Accesses = Kept
    for used in ((1, 1), (2, 2), (3, 4) * 40):
        part_numbers.watch(report, f"streams {used[:2]}", lambda used=used: run(used), wanted=False, overlapped=False)
    return report.found()["failed"]


def test_runs_know_nothing_of_each_other_and_a_race_is_told_in_full(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ((failed,),) = run_distributed(_watched, 1, tmp_path, init=False)
    assert failed["what"] == "sanitizer, streams (3, 4)"
    assert failed["error"].startswith("later, on stream 4: aten::add_ writing to it, called at\n  lightning_freescale/")
    assert failed["error"].splitlines()[-1].startswith("79 x aten::add_ at _worker.py:")
    printed = capfd.readouterr().out
    assert printed.count("CSAN detected a possible data race") == 5 and "test_part_numbers.py" in printed
