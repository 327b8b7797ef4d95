"""Packing FBGEMM and TorchRec for one GPU: which bytes become zeros, what is refused, and the way back out of the archive."""

from __future__ import annotations

import io
import json
import lzma
import mmap
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import fatbin
import pack
import pytest

SCRIPT = Path(pack.__file__).with_name("unpack_site.py")
PYTHON = ".".join(map(str, sys.version_info[:2]))
PTX, CUBIN = fatbin.PTX, fatbin.CUBIN
CUDART = b"\0libcudart.so.13\0"


def image(kind: int, arch: int, size: int, header: int = 64) -> tuple[bytes, bytes]:
    """An entry of a fat binary: its header, and code that is like no other's."""
    fields = struct.pack("<HHIQIIHHI", kind, 0x101, header, size, 0, 0, 8, 1, arch)
    return fields.ljust(header, b"h"), bytes((arch + kind + byte * byte) % 255 + 1 for byte in range(size))


def zeros(entry: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    return entry[0], bytes(len(entry[1]))


def fat(*entries: tuple[bytes, bytes]) -> bytes:
    body = b"".join(header + code for header, code in entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(gpu: bytes, section: bytes = b".nv_fatbin", host: bytes = CUDART, last: bool = False) -> bytes:
    """A 64-bit ELF file with two sections: the GPU code, at byte 96 or at the very end, and the sections' names."""
    host = host.ljust(len(host) + -len(host) % 16, b"\0")
    names = b"\0" + section + b"\0.shstrtab\0"
    parts = {"start": bytes(64), "host": host, "gpu": gpu, "names": names, "table": bytes(3 * 64)}
    if last:
        parts["gpu"] = parts.pop("gpu")
    at = {name: sum(map(len, list(parts.values())[:number])) for number, name in enumerate(parts)}
    result = bytearray(b"".join(parts.values()))
    result[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", result, 0x28, at["table"])
    struct.pack_into("<HHH", result, 0x3A, 64, 3, 2)
    struct.pack_into("<IIQQQQ", result, at["table"] + 64, 1, 1, 2, 0, at["gpu"], len(gpu))
    struct.pack_into("<IIQQQQ", result, at["table"] + 128, 2 + len(section), 3, 0, 0, at["names"], len(names))
    return bytes(result)


SM80, SM90, SM100 = image(CUBIN, 80, 48), image(CUBIN, 90, 80), image(CUBIN, 100, 112, header=112)
TEXT = image(PTX, 90, 24)
LARGE = image(CUBIN, 90, 40_000)  # more than what tarfile reads at once
TWO = fat(SM80, SM90, SM100, TEXT) + bytes(8) + fat(LARGE, image(PTX, 80, 16))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return tmp_path / "kernels.so"


# ---- which code is zeroed


def test_all_but_one_architecture_becomes_zeros_and_the_rest_stays(library: Path) -> None:
    library.write_bytes(elf(TWO))
    kept, zeroed = fatbin.prune(library, 90)
    first = fat(zeros(SM80), SM90, zeros(SM100), zeros(TEXT))
    second = fat(LARGE, zeros(image(PTX, 80, 16)))
    assert library.read_bytes() == elf(first + bytes(8) + second)
    assert [str(one) for one in kept] == ["sm_90", "sm_90"] and [one.end - one.start for one in kept] == [80, 40_000]
    assert [str(one) for one in zeroed] == ["sm_80", "sm_100", "PTX_90", "PTX_80"]


def test_another_architecture_can_be_kept(library: Path) -> None:
    library.write_bytes(elf(fat(SM80, SM90)))
    fatbin.prune(library, 80)
    assert library.read_bytes() == elf(fat(SM80, zeros(SM90)))


def test_code_that_is_linked_apart_is_found_too(library: Path) -> None:
    library.write_bytes(elf(fat(SM80, SM90), section=b"__nv_relfatbin"))
    fatbin.prune(library, 90)
    assert library.read_bytes() == elf(fat(zeros(SM80), SM90), section=b"__nv_relfatbin")


@pytest.mark.parametrize("content", [b"", b"not a library", elf(b""), elf(b"text", section=b".text")])
def test_files_without_gpu_code_stay(library: Path, content: bytes) -> None:
    library.write_bytes(content)
    assert fatbin.prune(library, 90) == ([], [])
    assert library.read_bytes() == content


def test_a_library_of_this_machine_is_read() -> None:
    """What a linker wrote, not this test; Python itself has no GPU code."""
    with Path(sys.executable).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert list(fatbin.fat_binaries(data, "python")) == []
        assert data[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        (fat(SM80, TEXT), "kernels.so: the fat binary at byte 96 has no sm_90 machine code, only PTX_90, sm_80"),
        (fat(SM90) + fat(SM80), "the fat binary at byte 256 has no sm_90 machine code, only sm_80"),
        (fat(SM90, image(16, 90, 24)), "the entry at byte 256 is of kind 16, neither PTX"),
        (fat(SM90, (SM80[0], SM80[1][:-8])), "the entry at byte 256, a header of 64 bytes and 48 of code, does not fit"),
        (fat(SM90, image(CUBIN, 80, 48, header=48)), "a header of 48 bytes and 48 of code, does not fit"),
        (fat(SM90, (b"h" * 32, b"")), "the entry at byte 256 has 32 bytes, its header alone 64"),
        (fat(SM90)[:-8], "the fat binary at byte 96 is longer than its section"),
        (b"\x50\xed\x55\xba\x02\0\x10\0" + fat(SM90)[8:], "no fat binary of version 1 at byte 96, but 50 ed 55 ba 02 00 10 00"),
        (fat(SM90) + b"more", "no fat binary of version 1 at byte 256"),
    ],
)
def test_code_that_is_not_understood_is_refused_and_left(library: Path, gpu: bytes, message: str) -> None:
    content = elf(gpu)
    library.write_bytes(content)
    with pytest.raises(ValueError, match=f".*{message}"):
        fatbin.prune(library, 90)
    assert library.read_bytes() == content


def test_code_outside_of_its_section_is_refused(library: Path) -> None:
    library.write_bytes(elf(fat(SM90), host=CUDART + bytes(15) + fat(SM80)))
    with pytest.raises(ValueError, match=r"kernels.so: GPU code at byte 96, outside of .nv_fatbin and __nv_relfatbin"):
        fatbin.prune(library, 90)


# ---- into the archive and out of it


def wheel(folder: Path, pin: str, files: dict[str, bytes], tags: str = "py3-none-any") -> Path:
    path = folder / f"{pin.replace('-', '_').replace('==', '-')}-{tags}.whl".replace("__", "_")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(info, content)
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Every wheel that pack.py wants for torch 2.11, so that it downloads none."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    tag = f"cp{PYTHON.replace('.', '')}"
    for pin in [*pack.RELEASES["2.11"], *pack.NEEDS]:
        package = pin.partition("==")[0].replace("-", "_")
        files = {f"{package}/__init__.py": f"name = {package!r}\n".encode()}
        if package == "fbgemm_gpu":
            files |= {f"{package}/kernels.so": elf(TWO), f"{package}/last.so": elf(TWO, last=True)}
            files |= {f"{package}/more/host.so": elf(b"text", section=b".text")}
            wheel(folder, pin, files, f"{tag}-{tag}-manylinux_2_28_x86_64")
        else:
            wheel(folder, pin, files)
    return folder


def packed(wheels: Path, *more: str) -> Path:
    out = wheels.parent / "site.tar.xz"
    flags = ["--torch", "2.11.0", "--cuda", "13.0", "--python", PYTHON, "--arch", "90", "--wheels", str(wheels)]
    pack.main([*flags, "--out", str(out), *more])
    return out


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds torch 2.11.0 for CUDA 13.0 and one H200."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('importing torch takes seconds')\n")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda = '13.0'\n")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 9.0\n")
    smi.chmod(0o755)
    return os.environ | {"PYTHONPATH": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def unpack(archive: Path, target: Path, machine: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(archive), str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=machine)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    expected = {f"{name}/__init__.py" for name in ("torchrec", "tensordict", "pyvers", "jsonschema", "referencing", "rpds_py")}
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


# ---- what pack.py refuses


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
