"""What comes out of the archive is what was in the wheels, on the machine that it is for."""

from __future__ import annotations

import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import fatbin
import pytest

from tests.gpu_benchmarks.made_up_wheels import PYTHON, SCRIPT, TWO, contents, elf, packed, unpack


def test_what_is_unpacked_is_what_was_in_the_wheels(
    wheels: Path, machine: dict[str, str], capsys: pytest.CaptureFixture
) -> None:
    archive, target = packed(wheels), wheels.parent / "new" / "site"
    printed = capsys.readouterr().out
    done = unpack(archive, target, machine)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(target)
    found = contents(target)
    del found[".site.json"]
    packages = ("torchrec", "tensordict", "pyvers", "jsonschema", "referencing", "rpds_py", "orjson")
    expected = {f"{name}/__init__.py" for name in packages}
    assert found.keys() >= expected
    for name, content in {"kernels": elf(TWO), "last": elf(TWO, last=True)}.items():
        library = wheels.parent / f"{name}.so"
        library.write_bytes(content)
        fatbin.prune(library, 90)
        assert found[f"fbgemm_gpu/{name}.so"] == library.read_bytes()
    assert found["fbgemm_gpu/more/host.so"] == elf(b"text", section=b".text")
    assert found["fbgemm_gpu/__init__.py"] == b"name = 'fbgemm_gpu'\n"
    assert os.access(target / "fbgemm_gpu/kernels.so", os.X_OK) and not os.access(target / "fbgemm_gpu/__init__.py", os.X_OK)
    row = next(line for line in printed.splitlines() if line.startswith("fbgemm_gpu/kernels.so"))
    assert len(row.split()) == 5
    assert f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB of 64" in printed
    assert not list(wheels.parent.glob("pack-*")) and not list(target.parent.glob("*.partial"))


def test_tar_reads_the_archive(wheels: Path) -> None:
    with tarfile.open(fileobj=lzma.open(packed(wheels)), mode="r|") as members:
        names = [member.name for member in members]
    assert names[0] == "manifest.json" and names[-1] == "gpu/fbgemm_gpu/last.so"
    assert "host/fbgemm_gpu/kernels.so" in names and "gpu/fbgemm_gpu/more/host.so" not in names


def test_unpacking_again_changes_nothing(wheels: Path, machine: dict[str, str]) -> None:
    archive, target = packed(wheels), wheels.parent / "site"
    unpack(archive, target, machine)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    done = unpack(archive, target, machine)
    assert done.returncode == 0 and "are there already" in done.stdout
    assert done.stdout.splitlines()[-1] == str(target)
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before


def test_what_a_killed_run_left_is_no_hindrance(wheels: Path, machine: dict[str, str]) -> None:
    archive, target = packed(wheels), wheels.parent / "site"
    (wheels.parent / "site.partial").mkdir()
    (wheels.parent / "site.partial" / "half").write_text("")
    assert unpack(archive, target, machine).returncode == 0
    assert not (target / "half").exists()


@pytest.mark.parametrize(("name", "content"), [("torchrec/__init__.py", "other"), ("torchrec/__init__.py", None)])
def test_a_changed_folder_is_refused(wheels: Path, machine: dict[str, str], name: str, content: str | None) -> None:
    archive, target = packed(wheels), wheels.parent / "site"
    unpack(archive, target, machine)
    if content is None:
        (target / name).unlink()
    else:
        (target / name).write_text(content)
    done = unpack(archive, target, machine)
    assert done.returncode == 1 and f"{target / name}" in done.stderr and f"remove {target} and unpack again" in done.stderr


def test_a_folder_of_something_else_is_refused_and_left(wheels: Path, machine: dict[str, str]) -> None:
    target = wheels.parent / "mine"
    target.mkdir()
    (target / "thesis.tex").write_text("")
    done = unpack(packed(wheels), target, machine)
    assert done.returncode == 1 and f"{target} is there and was not made of this archive" in done.stderr
    assert [path.name for path in target.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("place", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_archive_is_refused(wheels: Path, machine: dict[str, str], place: float, damage: str) -> None:
    archive, target = packed(wheels), wheels.parent / "site"
    content = bytearray(archive.read_bytes())
    at = int(place * len(content))
    content[at] ^= 0xFF
    archive.write_bytes(content if damage == "flip" else content[:at])
    done = unpack(archive, target, machine)
    assert done.returncode == 1 and f"{archive}: not unpacked: " in done.stderr and "Traceback" not in done.stderr
    assert not target.exists()


def rewritten(archive: Path, **changes: object) -> None:
    """The same archive with another manifest."""
    with tarfile.open(fileobj=lzma.open(archive), mode="r:") as members:
        parts = [(member, members.extractfile(member).read()) for member in members.getmembers()]
    manifest = json.loads(parts[0][1]) | changes
    parts[0] = (parts[0][0], json.dumps(manifest).encode())
    with lzma.open(archive, "w") as stream, tarfile.open(fileobj=stream, mode="w|") as members:
        for member, content in parts:
            member.size = len(content)
            members.addfile(member, io.BytesIO(content))


def test_a_wrong_checksum_is_refused(wheels: Path, machine: dict[str, str]) -> None:
    archive, target = packed(wheels), wheels.parent / "site"
    with tarfile.open(fileobj=lzma.open(archive), mode="r|") as members:
        files = json.load(members.extractfile(members.next()))["files"]
    files[1]["sha256"] = files[0]["sha256"]
    rewritten(archive, files=files)
    done = unpack(archive, target, machine)
    assert done.returncode == 1 and f"{files[1]['name']} has not the size and checksum of the manifest" in done.stderr
    assert not target.exists()


def test_a_file_outside_of_the_folder_is_refused(wheels: Path, machine: dict[str, str]) -> None:
    archive = packed(wheels)
    rewritten(archive, files=[{"name": "../outside"}])
    done = unpack(archive, wheels.parent / "site", machine)
    assert done.returncode == 1 and "../outside would lie outside of the folder" in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"python": "3.7"}, f"packed for Python 3.7, and here it is {PYTHON}"),
        ({"torch": "2.12.0"}, "packed for torch 2.12, and here it is 2.11"),
        ({"cuda": "12.8"}, "packed for CUDA 12, and here it is 13"),
        ({"arch": 100}, "packed for a GPU of architecture 100, and here it is 90"),
        ({"machine": "aarch64"}, "packed for a processor aarch64, and here it is x86_64"),
        ({"format": 0}, "of format 0, this script reads 1"),
    ],
)
def test_an_archive_for_another_machine_is_refused(
    wheels: Path, machine: dict[str, str], change: dict[str, object], message: str
) -> None:
    archive, target = packed(wheels), wheels.parent / "site"
    rewritten(archive, **change)
    done = unpack(archive, target, machine)
    assert done.returncode == 1 and message in done.stderr
    assert not target.exists()


def test_torch_without_cuda_and_no_torch_are_refused(wheels: Path, machine: dict[str, str]) -> None:
    archive, target = packed(wheels), wheels.parent / "site"
    version = wheels.parent / "torch" / "version.py"
    version.write_text("__version__ = '2.11.0+cpu'\ncuda = None\n")
    assert "packed for CUDA 13, and here it is none" in unpack(archive, target, machine).stderr
    version.with_name("__init__.py").unlink()  # and isolated from the site-packages of this test's torch
    version.unlink()
    version.parent.rmdir()
    done = subprocess.run(
        [sys.executable, "-S", str(SCRIPT), str(archive), str(target)],
        capture_output=True,
        text=True,
        env=machine,
    )
    assert "packed for torch 2.11.0, and there is no torch here" in done.stderr


def test_a_machine_without_a_gpu_driver_is_told_so(wheels: Path, machine: dict[str, str]) -> None:
    (wheels.parent / "nvidia-smi").write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    done = unpack(packed(wheels), wheels.parent / "site", machine)
    assert done.returncode == 0 and "GPUs not compared with the archive: nvidia-smi says no devices were found" in done.stderr
