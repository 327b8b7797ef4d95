"""Which bytes of a library become zeros, and what is refused."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import fatbin
import pytest

from tests.gpu_benchmarks.made_up_wheels import (
    CUBIN,
    CUDART,
    LARGE,
    PTX,
    SM80,
    SM90,
    SM100,
    TEXT,
    TWO,
    elf,
    fat,
    image,
    zeros,
)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return tmp_path / "kernels.so"


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
