"""Packs TorchRec and FBGEMM for a GPU machine without a network.

``python benchmarks/gpu/pack.py --torch 2.11.0 --cuda 13.0 --python 3.12 --arch 90 --out site.tar.xz`` downloads the published
wheels that fit, overwrites the GPU code of all other architectures with zeros (fatbin.py), and packs the result. Copy the
archive and unpack_site.py to the other machine, where unpack_site.py creates a folder for PYTHONPATH from it. Nothing is built,
and no GPU is needed here.

The command refuses an archive above --limit-mib, a library without machine code for --arch or with an unknown layout of GPU
code, and FBGEMM for another CUDA.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

sys.path.append(str(Path(__file__).parents[1]))

import fatbin
import harness
import unpack_site

MACHINE = "x86_64"
_PLATFORMS = [f"manylinux{version}_{MACHINE}" for version in ("_2_28", "_2_27", "_2_17", "2014")]  # pip wants each by name

# By torch's minor version. FBGEMM's wheels do not say which torch they are for. Its table of releases, which ends with 1.5 for
# torch 2.10, goes on so; fbgemm-gpu 1.6.0 loads in torch 2.11.0+cu130, where a missing symbol would be an error.
RELEASES = {
    "2.11": ["fbgemm-gpu==1.6.0", "torchrec==1.6.1"],
    "2.13": ["fbgemm-gpu==1.8.0", "torchrec==1.8.0"],  # as in pyproject.toml
}

# What else the two and this package import that a machine with torch, Lightning, numpy and pyarrow need not have, and why. Not
# here: iopath and torchmetrics, which importing TorchRec does not import, and attrs, cloudpickle, tqdm, typing-inspect and
# wrapt, which came with other packages there; --with adds them.
NEEDS = {
    "tensordict==0.15.3": "torchrec.distributed imports it; from 0.15 on pure Python, for torch 2.11 or newer",
    "pyvers==0.2.2": "tensordict imports it",
    "jsonschema==4.26.0": "the profiler's report is checked against its schema",
    "jsonschema-specifications==2025.9.1": "jsonschema imports it",
    "referencing==0.37.0": "jsonschema imports it",
    "rpds-py==2026.9.1": "referencing imports it",
    "pyre-extensions==0.0.32": "torchrec imports it",
    "orjson==3.13.0": "the profiler's report is written with it",
}

# Host code: with jumps made absolute (the x86 filter) it is an eighth smaller. GPU code repeats itself over many megabytes, and
# its instructions are 16 bytes long.
_LZMA = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 28}
_HOST = [{"id": lzma.FILTER_X86}, _LZMA]
_GPU = [_LZMA | {"lc": 1, "lp": 3, "pb": 4}]


@dataclass
class Packed:
    """A file of the archive.

    Attributes:
        name: Its path in the folder that unpack_site.py creates.
        path: Its present path, with zeros for the GPU code that is left out.
        size: Its bytes.
        kept: Bytes of GPU code that it keeps.
        zeroed: Bytes of GPU code that are zeros.
        pieces: For ``"host"`` and ``"gpu"``, start and length of each piece, in bytes.
        archived: Bytes that the archive grew by; it grows in steps of some 64 KiB.
    """

    name: str
    path: Path
    size: int
    kept: int
    zeroed: int
    pieces: dict[str, list[tuple[int, int]]]
    archived: int = 0


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.out.parent, prefix="pack-") as folder:
            place = Path(folder)
            wheels = options.wheels or place / "wheels"
            wheels.mkdir(parents=True, exist_ok=True)
            pins = [*RELEASES[_minor(options.torch)], *NEEDS, *options.also]
            found = [find_wheel(pin, options.python, wheels) for pin in pins]
            downloaded = sum(wheel.stat().st_size for wheel in found)
            files = prune_all(stage(found, place / "site"), place / "site", options.arch)
            refuse_other_cuda(files, options.cuda)
            size = write(files, options, place / "archive")
            (place / "archive").rename(options.out)
    except (OSError, ValueError) as error:
        sys.exit(f"not packed: {error}")
    show(files)
    print(f"{options.out}: {size / 2**20:.1f} MiB of {options.limit_mib:g}")
    totals = {"files": [f.size for f in files], "kept": [f.kept for f in files], "zeroed": [f.zeroed for f in files]}
    totals |= {"wheels": [downloaded], "archive": [size]}
    figures = {f"{name}_mib": sum(sizes) / 2**20 for name, sizes in totals.items()}
    harness.finish(figures | {f"{Path(file.name).name}_mib": file.archived / 2**20 for file in files if file.kept}, options)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--torch", required=True, help="version of torch on the GPU machine, such as 2.11.0")
    add("--cuda", required=True, help="the CUDA that torch was built with (torch.version.cuda), such as 13.0")
    add("--python", required=True, help="version of Python on the GPU machine, such as 3.12")
    add("--arch", type=int, required=True, help="compute capability of its GPU without the dot: 90 for H100 and H200")
    add("--out", type=Path, required=True, metavar="ARCHIVE", help="archive to write; ends with .tar.xz")
    add("--wheels", type=Path, metavar="DIR", help="folder of wheels; missing ones are downloaded to it")
    add("--limit-mib", type=float, default=64.0, metavar="N", help="largest allowed size of the archive (default: 64)")
    add(
        "--with",
        dest="also",
        action="append",
        default=[],
        metavar="NAME==VERSION",
        help="another package, without dependencies",
    )
    options = parser.parse_args(arguments)
    if _minor(options.torch) not in RELEASES:
        known = ", ".join(RELEASES)
        parser.error(f"--torch {options.torch}: only for {known} is known which FBGEMM and TorchRec fit; add a row to RELEASES")
    for pin in options.also:
        if not re.fullmatch(r"[\w.-]+==[\w.+!-]+", pin):
            parser.error(f"--with {pin}: write NAME==VERSION")
    if not options.out.name.endswith(".tar.xz"):
        parser.error(f"--out {options.out}: end it with .tar.xz, which is what it will be")
    return options


def _minor(torch: str) -> str:
    return ".".join(torch.split(".")[:2])


def find_wheel(pin: str, python: str, folder: Path) -> Path:
    """Return the wheel of ``NAME==VERSION`` in ``folder``; download it if necessary.

    Raises:
        ValueError: There is no such wheel.
    """
    if here := _lying_in(folder, pin, python):
        return here
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--python-version", python, "--implementation", "cp", pin]
    done = subprocess.run([*command, *(f"--platform={name}" for name in _PLATFORMS)], capture_output=True, text=True)
    here = _lying_in(folder, pin, python)
    if done.returncode or here is None:
        errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise ValueError(f"pip has no wheel of {pin} for Python {python} on {MACHINE}: " + " ".join(errors))
    return here


def _lying_in(folder: Path, pin: str, python: str) -> Path | None:
    """Return the wheel in a folder with this name and version."""
    name, _, version = pin.partition("==")
    digits = python.replace(".", "")
    for path in sorted(folder.glob("*.whl")):
        called, numbered, *_, pythons, abi, platform = path.stem.split("-")
        named = (_normal(called), numbered) == (_normal(name), version)
        runs = abi == "abi3" or {f"cp{digits}", f"py{digits}", "py3"} & set(pythons.split("."))
        if named and runs and (platform == "any" or platform.endswith(MACHINE)):
            return path
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def stage(wheels: list[Path], site: Path) -> list[str]:
    """Extract the wheels to a folder, as they would be installed.

    Returns:
        The files' names, sorted.

    Raises:
        ValueError: A wheel installs files elsewhere too, or two wheels have the same file.
    """
    names: set[str] = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if not info.is_dir()]
            for info in members:
                if info.filename in names:
                    raise ValueError(f"{wheel.name}: {info.filename} is in another wheel too")
                if info.filename.partition("/")[0].endswith(".data"):
                    raise ValueError(f"{wheel.name}: {info.filename} belongs outside of site-packages, which is not supported")
                archive.extract(info, site)
                (site / info.filename).chmod(0o755 if info.external_attr >> 16 & 0o100 else 0o644)
                names.add(info.filename)
    return sorted(names)


def prune_all(names: list[str], site: Path, arch: int) -> list[Packed]:
    """Overwrite GPU code in the libraries among the files with zeros (see :func:`fatbin.prune`).

    Raises:
        ValueError: A library is not understood or has no code for ``arch``.
    """
    files = []
    for name in names:
        path = site / name
        library = name.endswith(".so") or ".so." in name
        kept, zeroed = fatbin.prune(path, arch) if library else ([], [])
        gpu = [(image.start, image.end - image.start) for image in kept]
        holes = sorted((image.start, image.end) for image in kept + zeroed)
        starts = [0, *(end for _, end in holes)]
        size = path.stat().st_size
        ends = [*(start for start, _ in holes), size]
        host = [(start, end - start) for start, end in zip(starts, ends) if end > start]
        lost = sum(image.end - image.start for image in zeroed)
        files.append(Packed(name, path, size, sum(length for _, length in gpu), lost, {"host": host, "gpu": gpu}))
    if not any(file.kept for file in files):
        raise ValueError(f"no library has GPU code for sm_{arch}, so these wheels are for machines without a GPU")
    return files


def refuse_other_cuda(files: list[Packed], cuda: str) -> None:
    """Compare the CUDA version of the libraries with that of the target machine.

    Raises:
        ValueError: They differ.
    """
    major = cuda.split(".")[0]
    for file in files:
        if not file.kept:
            continue
        with file.path.open("rb") as library:
            start, size = file.pieces["host"][0]  # names of libraries stand before the GPU code
            library.seek(start)
            linked = {number.decode() for number in re.findall(rb"\0libcudart\.so\.(\d+)\0", library.read(size))}
        if linked - {major}:
            raise ValueError(f"{file.name} links libcudart.so.{linked.pop()}, and --cuda {cuda} has libcudart.so.{major}")


def write(files: list[Packed], options: argparse.Namespace, path: Path) -> int:
    """Write the archive in the layout that unpack_site.py describes.

    Returns:
        Its size in bytes.

    Raises:
        ValueError: It is larger than ``options.limit_mib``.
    """
    described = {
        "format": unpack_site.FORMAT,
        "python": options.python,
        "torch": options.torch,
        "cuda": options.cuda,
        "machine": MACHINE,
        "arch": options.arch,
        "files": [_described(file) for file in files],
    }
    with path.open("wb") as raw:
        stream = _Streams(raw, options.limit_mib)
        stream.begin(_HOST)
        with tarfile.TarFile(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
            text = json.dumps(described).encode()
            archive.addfile(_member(unpack_site.MANIFEST, len(text)), io.BytesIO(text))
            for part in ("host", "gpu"):
                if part == "gpu":
                    stream.begin(_GPU)
                for file in files:
                    if part == "gpu" and not file.kept:
                        continue
                    before = stream.written
                    with file.path.open("rb") as source:
                        pieces = _Pieces(source, file.pieces[part])
                        archive.addfile(_member(f"{part}/{file.name}", pieces.size), pieces)
                    file.archived += stream.written - before
        stream.end()
    return stream.written


def _described(file: Packed) -> dict[str, object]:
    executable = bool(file.path.stat().st_mode & 0o100)
    digest = unpack_site.digest(file.path)
    return {"name": file.name, "size": file.size, "sha256": digest, "executable": executable} | file.pieces


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


class _Streams:
    """A file for writing that compresses to one xz stream after another; xz, tar and Python read them as one."""

    def __init__(self, raw: IO[bytes], limit_mib: float) -> None:
        self._raw = raw
        self._limit_mib = limit_mib
        self._compressor: lzma.LZMACompressor | None = None
        self._taken = 0
        self.written = 0

    def begin(self, filters: list[dict[str, int]]) -> None:
        self.end()
        self._compressor = lzma.LZMACompressor(lzma.FORMAT_XZ, lzma.CHECK_CRC64, filters=filters)

    def end(self) -> None:
        if self._compressor is not None:
            self._put(self._compressor.flush())

    def write(self, data: bytes) -> int:
        assert self._compressor is not None
        self._put(self._compressor.compress(data))
        self._taken += len(data)
        return len(data)

    def tell(self) -> int:
        return self._taken

    def _put(self, data: bytes) -> None:
        self._raw.write(data)
        self.written += len(data)
        if self.written > self._limit_mib * 2**20:
            raise ValueError(f"the archive is larger than --limit-mib {self._limit_mib:g}: raise the limit, or remove a --with")


class _Pieces:
    """A file for reading: the pieces of another file, one after the other."""

    def __init__(self, source: IO[bytes], pieces: list[tuple[int, int]]) -> None:
        self._source = source
        self._left = list(pieces)
        self.size = sum(size for _, size in pieces)

    def read(self, size: int) -> bytes:
        taken = []
        while size and self._left:
            start, length = self._left.pop(0)
            self._source.seek(start)
            taken.append(self._source.read(min(size, length)))
            size -= len(taken[-1])
            if len(taken[-1]) < length:
                self._left.insert(0, (start + len(taken[-1]), length - len(taken[-1])))
        return b"".join(taken)


def show(files: list[Packed]) -> None:
    """Print the result for each library, in MiB."""
    print(f"{'file, MiB':<58}{'size':>9}{'GPU kept':>10}{'zeroed':>9}{'archived':>10}")
    rest = [file for file in files if not file.kept + file.zeroed]
    for file in files:
        if file not in rest:
            _show_row(file.name, [file])
    _show_row(f"{len(rest)} files without GPU code", rest)
    _show_row("all", files)


def _show_row(name: str, files: list[Packed]) -> None:
    sizes = [sum(numbers) / 2**20 for numbers in zip(*((f.size, f.kept, f.zeroed, f.archived) for f in files))]
    print(f"{name:<58}{sizes[0]:9.2f}{sizes[1]:10.2f}{sizes[2]:9.2f}{sizes[3]:10.2f}")


if __name__ == "__main__":
    main()
