"""GPU code in a CUDA library: find it, and overwrite the code that one GPU does not need with zeros.

nvcc puts GPU code into the ELF section ``.nv_fatbin`` (``__nv_relfatbin`` if device code is linked separately): one fat binary
for each source file, each with a header and entries. All numbers are little-endian. NVIDIA does not publish the layout; the
tools that read it agree on this one.

=======  ======  ================================================================
fat binary, 16 bytes
---------------------------------------------------------------------------------
at 0     uint32  0xBA55ED50
at 4     uint16  version, 1
at 6     uint16  size of this header, 16
at 8     uint64  bytes of all entries after it
entry, 64 bytes or more
---------------------------------------------------------------------------------
at 0     uint16  kind: 1 is PTX (text, compiled when loaded), 2 a cubin (ELF, machine code)
at 4     uint32  size of this header
at 8     uint64  size of the image after it, padding included
at 28    uint32  architecture: 90 for sm_90 and sm_90a
at 40    uint64  flags: 0x2000 or 0x8000 if the image is compressed, by LZ4 or zstd
=======  ======  ================================================================

Headers stay, and so do all pointers to them. Only images become zeros, which compress to nothing. The driver reads the image
that fits its GPU and ignores the others. A compressed image is kept or overwritten as a whole.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
PTX, CUBIN = 1, 2
_START = struct.pack("<IHH", 0xBA55ED50, 1, 16)
_SMALLEST_ENTRY = 64


@dataclass(frozen=True)
class Image:
    """The code of an entry: its kind, its architecture and the bytes [``start``, ``end``) of the file."""

    kind: int
    arch: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"{'PTX' if self.kind == PTX else 'sm'}_{self.arch}"


def prune(path: Path, arch: int) -> tuple[list[Image], list[Image]]:
    """Overwrite all GPU code of a library with zeros, in place, except machine code for one architecture.

    Args:
        path: The library. Nothing is written unless all of it is understood.
        arch: The architecture to keep, 90 for compute capability 9.0.

    Returns:
        The images that are kept, and those that are zeros now. Both are empty for a library without GPU code.

    Raises:
        ValueError: GPU code has an unknown layout, or a fat binary has no machine code for ``arch``.
    """
    with path.open("r+b") as file:
        if not path.stat().st_size:
            return [], []  # which cannot be mapped
        with mmap.mmap(file.fileno(), 0) as data:
            kept, zeroed = [], []
            for start, images in fat_binaries(data, path.name):
                fitting = [image for image in images if (image.kind, image.arch) == (CUBIN, arch)]
                if images and not fitting:
                    has = ", ".join(sorted({str(image) for image in images}))
                    raise ValueError(f"{path.name}: the fat binary at byte {start} has no sm_{arch} machine code, only {has}")
                kept += fitting
                zeroed += [image for image in images if image not in fitting]
            for image in zeroed:
                data[image.start : image.end] = bytes(image.end - image.start)
            return kept, zeroed


def fat_binaries(data: mmap.mmap, name: str) -> Iterator[tuple[int, list[Image]]]:
    """Return the start of each fat binary of a library, and its images.

    Args:
        data: The whole file.
        name: The name of the file in errors.

    Raises:
        ValueError: GPU code has an unknown layout.
    """
    spans = sorted(_gpu_sections(data))
    for start, end in spans:
        at = start
        while at < end:
            if data[at : at + len(_START)] == _START:
                images, stop = _images(data, at, end, name)
                yield at, images
                at = stop
            elif not any(data[at : at + 8]):
                at += 8  # padding: fat binaries begin at multiples of 8
            else:
                raise ValueError(f"{name}: no fat binary of version 1 at byte {at}, but {data[at : at + 8].hex(' ')}")
    _refuse_elsewhere(data, spans, name)


def _images(data: mmap.mmap, start: int, end: int, name: str) -> tuple[list[Image], int]:
    """Return the images of the fat binary at ``start``, and its end."""
    at = start + len(_START) + 8
    stop = at + struct.unpack_from("<Q", data, start + len(_START))[0] if at <= end else at
    if stop > end:
        raise ValueError(f"{name}: the fat binary at byte {start} is longer than its section, which ends at byte {end}")
    images = []
    while at < stop:
        if stop - at < _SMALLEST_ENTRY:
            raise ValueError(f"{name}: the entry at byte {at} has {stop - at} bytes, its header alone {_SMALLEST_ENTRY}")
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        arch = struct.unpack_from("<I", data, at + 28)[0]
        if kind not in (PTX, CUBIN):
            raise ValueError(f"{name}: the entry at byte {at} is of kind {kind}, neither PTX ({PTX}) nor a cubin ({CUBIN})")
        if header < _SMALLEST_ENTRY or at + header + size > stop:
            raise ValueError(
                f"{name}: the entry at byte {at}, a header of {header} bytes and {size} of code, does not fit into its "
                f"fat binary, which ends at byte {stop}"
            )
        images.append(Image(kind, arch, at + header, at + header + size))
        at += header + size
    return images, stop


def _gpu_sections(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Return first and last byte, exclusive, of each section with GPU code; an empty list for files other than 64-bit ELF."""
    if data[:6] != b"\x7fELF\x02\x01":
        return
    table = struct.unpack_from("<Q", data, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    if not count:
        return
    strings = struct.unpack_from("<Q", data, table + names * size + 0x18)[0]
    for number in range(count):
        name = struct.unpack_from("<I", data, table + number * size)[0]
        start, length = struct.unpack_from("<QQ", data, table + number * size + 0x18)
        begin = strings + name
        if data[begin : data.find(b"\0", begin)] in SECTIONS:
            yield start, start + length


def _refuse_elsewhere(data: mmap.mmap, spans: list[tuple[int, int]], name: str) -> None:
    """Refuse a library with GPU code outside of the sections, which would stay unchanged."""
    at = 0
    for start, end in [*spans, (len(data), len(data))]:
        if (found := data.find(_START, at, start)) >= 0:
            raise ValueError(f"{name}: GPU code at byte {found}, outside of {' and '.join(map(bytes.decode, SECTIONS))}")
        at = end
