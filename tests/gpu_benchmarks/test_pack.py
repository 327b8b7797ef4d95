"""Wheels lose the GPU code of other architectures, and come out of the archive as they were, on the machine they are for."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import fatbin
import pack
import pytest

pytestmark = pytest.mark.slow

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


def elf(gpu: bytes, section: bytes = b".nv_fatbin", host: bytes = CUDART) -> bytes:
    """A 64-bit ELF file with two sections: the GPU code, at byte 96, and the sections' names."""
    host = host.ljust(len(host) + -len(host) % 16, b"\0")
    names = b"\0" + section + b"\0.shstrtab\0"
    parts = {"start": bytes(64), "host": host, "gpu": gpu, "names": names, "table": bytes(3 * 64)}
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


def test_all_but_one_architecture_becomes_zeros_and_the_rest_stays(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    library.write_bytes(elf(TWO))
    kept, zeroed = fatbin.prune(library, 90)
    first = fat(zeros(SM80), SM90, zeros(SM100), zeros(TEXT))
    second = fat(LARGE, zeros(image(PTX, 80, 16)))
    assert library.read_bytes() == elf(first + bytes(8) + second)
    assert [str(one) for one in kept] == ["sm_90", "sm_90"] and [one.end - one.start for one in kept] == [80, 40_000]
    assert [str(one) for one in zeroed] == ["sm_80", "sm_100", "PTX_90", "PTX_80"]
    library.write_bytes(elf(fat(SM80, SM90), section=b"__nv_relfatbin"))
    fatbin.prune(library, 80)
    assert library.read_bytes() == elf(fat(SM80, zeros(SM90)), section=b"__nv_relfatbin")
    for content in (b"", b"not a library", elf(b""), elf(b"text", section=b".text")):
        library.write_bytes(content)
        assert fatbin.prune(library, 90) == ([], []) and library.read_bytes() == content


# -- the archive


def _wheel(folder: Path, pin: str, files: dict[str, bytes], tags: str = "py3-none-any") -> None:
    path = folder / f"{pin.replace('-', '_').replace('==', '-')}-{tags}.whl".replace("__", "_")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(info, content)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Every wheel that pack.py wants for torch 2.11, so that it downloads none; and beside it a torch, and one H200."""
    folder, tag = tmp_path / "wheels", f"cp{PYTHON.replace('.', '')}"
    folder.mkdir()
    for pin in [*pack.RELEASES["2.11"], *pack.NEEDS]:
        package = pin.partition("==")[0].replace("-", "_")
        files, tags = {f"{package}/__init__.py": f"name = {package!r}\n".encode()}, "py3-none-any"
        if package == "fbgemm_gpu":
            files |= {f"{package}/kernels.so": elf(TWO), f"{package}/more/host.so": elf(b"text", section=b".text")}
            tags = f"{tag}-{tag}-manylinux_2_28_x86_64"
        _wheel(folder, pin, files, tags)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('importing torch takes seconds')\n")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda = '13.0'\n")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 9.0\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    return folder


def _packed(wheels: Path, *more: str) -> Path:
    out = wheels.parent / "site.tar.xz"
    flags = ["--torch", "2.11.0", "--cuda", "13.0", "--python", PYTHON, "--arch", "90", "--wheels", str(wheels)]
    pack.main([*flags, "--out", str(out), *more])
    return out


def _unpack(archive: Path, target: Path) -> tuple[int, str]:
    machine = os.environ | {"PYTHONPATH": str(archive.parent), "PATH": f"{archive.parent}:{os.environ['PATH']}"}
    command = [sys.executable, str(SCRIPT), str(archive), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=machine)
    return done.returncode, done.stdout + done.stderr


def test_what_is_unpacked_is_what_was_in_the_wheels(wheels: Path, tmp_path: Path) -> None:
    archive, target = _packed(wheels, "--json", str(tmp_path / "f.json"), "--require", "archive_mib<=1"), tmp_path / "site"
    figures = json.loads((tmp_path / "f.json").read_text())["figures"]
    assert figures["archive_mib"] == archive.stat().st_size / 2**20
    assert 0 < figures["kept_mib"] + figures["zeroed_mib"] < figures["files_mib"]
    (tmp_path / "site.partial").mkdir()
    (tmp_path / "site.partial" / "half").write_text("")
    code, printed = _unpack(archive, target)
    assert code == 0, printed
    found = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    library = tmp_path / "kernels.so"
    library.write_bytes(elf(TWO))
    fatbin.prune(library, 90)
    assert found["fbgemm_gpu/kernels.so"] == library.read_bytes() and "half" not in found
    assert found["fbgemm_gpu/more/host.so"] == elf(b"text", section=b".text")
    assert found["torchrec/__init__.py"] == b"name = 'torchrec'\n"
    assert os.access(target / "fbgemm_gpu/kernels.so", os.X_OK) and not os.access(target / "torchrec/__init__.py", os.X_OK)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    assert _unpack(archive, target)[0] == 0 and {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before
    (target / "torchrec/__init__.py").write_text("other")
    code, told = _unpack(archive, target)
    assert code == 1 and str(target / "torchrec/__init__.py") in told
    for flags in (["--limit-mib", "0.001"], ["--arch", "70"], ["--cuda", "12.8"]):
        with pytest.raises(SystemExit) as stop:
            _packed(wheels, *flags)
        assert stop.value.code, flags


def test_a_damaged_archive_is_refused(wheels: Path, tmp_path: Path) -> None:
    archive = _packed(wheels)
    content, at = archive.read_bytes(), archive.stat().st_size // 2
    for damaged in (content[:at], content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]):
        archive.write_bytes(damaged)
        code, told = _unpack(archive, tmp_path / "site")
        assert code == 1 and f"{archive}: " in told and "Traceback" not in told and not (tmp_path / "site").exists()
