"""Wheels and libraries with GPU code, made up, and the machine that they are unpacked on."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
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
