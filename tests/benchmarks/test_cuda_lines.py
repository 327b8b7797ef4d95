"""What counts as a line that only CUDA runs."""

from __future__ import annotations

import ast
import textwrap

import cuda_code
import pytest
from cuda_code import find_cuda_lines, package_files, unclassified

MADE_UP = """\
    def conditions(device, tensor):
        if device.type == "cuda":
            a()
        else:
            b()
        if tensor.device.type != "cpu" and device.index:
            c()
        elif not tensor.is_cuda:
            d()
        else:
            e()
        if tensor.is_cuda or device.index:
            f()
        return [device] if tensor.is_cuda else []

    def ends(device, tensor):
        for each in tensor:
            if each.is_cpu:
                continue
            g()
        if not (device.type == "cuda" and tensor.is_cuda):
            return None
        h(
            device,
        )
        return torch.cuda.Stream()

    def names():
        torch.cuda.Event()
        tensor.record_stream(None if device.type == "cpu" else torch.cuda.current_stream())
"""


def _tree() -> ast.Module:
    return ast.parse(textwrap.dedent(MADE_UP))


def test_lines_and_arms_that_only_cuda_comes_to() -> None:
    found = find_cuda_lines("made_up.py", _tree())
    source = textwrap.dedent(MADE_UP).splitlines()
    held = [line.strip() for number, line in enumerate(source, 1) if found.holds(number)]
    assert held == ["a()", "c()", "e()", "g()", "h(", "device,", ")", "return torch.cuda.Stream()"]
    assert [ast.unparse(arm) for arm in found.arms] == ["[device]", "torch.cuda.current_stream()"]


def test_what_names_cuda_elsewhere_is_told() -> None:
    assert set(unclassified("made_up.py", _tree()).values()) == {"torch.cuda", "tensor.record_stream"}


@pytest.mark.parametrize("table", ["FUNCTIONS", "CONDITIONS"])
def test_what_is_listed_and_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    monkeypatch.setitem(
        getattr(cuda_code, table), "made_up.py", {"conditions": "", "gone": ""} if table == "FUNCTIONS" else {"gone": True}
    )
    with pytest.raises(LookupError, match=r"made_up.py has no \['gone'\]"):
        find_cuda_lines("made_up.py", _tree())


def test_every_line_of_the_package_that_names_cuda_is_classified() -> None:
    """Else add it to a list in benchmarks/cuda_code.py, with the reason."""
    told = {
        f"{name}:{line}": text
        for name, path in package_files()
        for line, text in unclassified(name, ast.parse(path.read_text())).items()
    }
    assert told == {}
    files = {name for name, _ in package_files()}
    assert cuda_code.FUNCTIONS.keys() | cuda_code.CONDITIONS.keys() | cuda_code.ON_CPU_AS_WELL.keys() <= files
