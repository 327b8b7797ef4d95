"""What is refused before anything is packed, and which wheels are found."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pack
import pytest

from tests.gpu_benchmarks.made_up_wheels import elf, packed, wheel


def refusal(wheels: Path, capsys: pytest.CaptureFixture, *more: str) -> str:
    with pytest.raises(SystemExit) as stop:
        packed(wheels, *more)
    assert stop.value.code not in (0, None)
    assert not (wheels.parent / "site.tar.xz").exists() and not list(wheels.parent.glob("pack-*"))
    return str(stop.value.code) + capsys.readouterr().err


def test_an_archive_above_the_limit_is_refused(wheels: Path, capsys: pytest.CaptureFixture) -> None:
    assert "the archive is larger than --limit-mib 0.001" in refusal(wheels, capsys, "--limit-mib", "0.001")


def test_a_library_without_code_for_the_gpu_is_refused(wheels: Path, capsys: pytest.CaptureFixture) -> None:
    assert "kernels.so: the fat binary at byte 96 has no sm_70 machine code" in refusal(wheels, capsys, "--arch", "70")


def test_wheels_for_another_cuda_are_refused(wheels: Path, capsys: pytest.CaptureFixture) -> None:
    said = refusal(wheels, capsys, "--cuda", "12.8")
    assert "fbgemm_gpu/kernels.so links libcudart.so.13, and --cuda 12.8 has libcudart.so.12" in said


def test_wheels_without_gpu_code_are_refused(wheels: Path, capsys: pytest.CaptureFixture) -> None:
    fbgemm = next(wheels.glob("fbgemm_gpu-*.whl"))
    fbgemm.unlink()
    with zipfile.ZipFile(fbgemm, "w") as archive:
        archive.writestr("fbgemm_gpu/host.so", elf(b"text", section=b".text"))
    assert "no library has GPU code for sm_90" in refusal(wheels, capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--torch", "2.5.0"], "--torch 2.5.0: only for 2.11, 2.13 is known"),
        (["--with", "iopath"], "--with iopath: write NAME==VERSION"),
        (["--out", "site.zip"], "--out site.zip: end it with .tar.xz"),
    ],
)
def test_wrong_arguments_are_refused(wheels: Path, capsys: pytest.CaptureFixture, flags: list[str], message: str) -> None:
    assert message in refusal(wheels, capsys, *flags)


def test_two_wheels_with_one_file_are_refused(wheels: Path, capsys: pytest.CaptureFixture) -> None:
    wheel(wheels, "other==1.0", {"torchrec/__init__.py": b""})
    assert "torchrec/__init__.py is in another wheel too" in refusal(wheels, capsys, "--with", "other==1.0")


def test_a_wheel_that_is_more_than_a_folder_is_refused(wheels: Path, capsys: pytest.CaptureFixture) -> None:
    wheel(wheels, "other==1.0", {"other-1.0.data/scripts/run": b""})
    assert "other-1.0.data/scripts/run belongs outside of site-packages" in refusal(wheels, capsys, "--with", "other==1.0")


@pytest.mark.parametrize(
    ("file", "python", "found"),
    [
        ("fbgemm_gpu-1.6.0-cp312-cp312-manylinux_2_28_x86_64.whl", "3.12", True),
        ("fbgemm_gpu-1.6.0-cp312-cp312-manylinux_2_28_x86_64.whl", "3.11", False),
        ("fbgemm_gpu-1.6.0-cp312-cp312-manylinux_2_28_aarch64.whl", "3.12", False),
        ("fbgemm_gpu-1.6.0.post1-cp312-cp312-manylinux_2_28_x86_64.whl", "3.12", False),
        ("fbgemm_gpu_cpu-1.6.0-cp312-cp312-manylinux_2_28_x86_64.whl", "3.12", False),
        ("FBGEMM.gpu-1.6.0-1-py2.py3-none-any.whl", "3.12", True),
        ("fbgemm_gpu-1.6.0-py312-none-any.whl", "3.12", True),
        ("fbgemm_gpu-1.6.0-cp39-abi3-manylinux2014_x86_64.whl", "3.12", True),
    ],
)
def test_finds_the_wheel_that_fits(tmp_path: Path, file: str, python: str, found: bool) -> None:
    (tmp_path / file).write_bytes(b"")
    assert (pack._lying_in(tmp_path, "fbgemm-gpu==1.6.0", python) is not None) == found


def test_what_pip_has_not_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"pip has no wheel of torchrec==1\.6\.1 for Python 3\.12 on x86_64: .*No matching"):
        pack.find_wheel("torchrec==1.6.1", "3.12", tmp_path)


def test_figures_are_of_what_was_packed(wheels: Path, tmp_path: Path) -> None:
    archive = packed(wheels, "--json", str(tmp_path / "figures.json"), "--require", "archive_mib<=1")
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["archive_mib"] == archive.stat().st_size / 2**20
    assert figures["wheels_mib"] == sum(each.stat().st_size for each in wheels.glob("*.whl")) / 2**20
    assert 0 < figures["kept_mib"] + figures["zeroed_mib"] < figures["files_mib"]
    assert 0 < figures["kernels.so_mib"] < figures["archive_mib"]
