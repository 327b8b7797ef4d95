"""What a rank packs is what its peer unpacks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lightning_freescale.comm.header import HEADER_BYTES, PAYLOAD_BYTES, Header

NUMBERS = st.integers(0, 2**62)
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=32)


def _unpack(packed: Tensor) -> Header:
    return Header.unpack(bytearray(packed.numpy().tobytes()))


def _round_trip(header: Header) -> Header:
    packed = header.pack()
    assert packed.shape == (HEADER_BYTES,)
    assert packed.dtype == torch.uint8
    return _unpack(packed)


@given(NAMES, NUMBERS, NUMBERS.map(lambda k: k + PAYLOAD_BYTES + 1), NUMBERS, NUMBERS, st.integers(0, 2**32 - 1))
def test_every_field_arrives(name: str, number: int, sends: int, expects: int, largest: int, dtype: int) -> None:
    header = Header(name, number, sends, expects, largest, dtype)
    assert _round_trip(header) == header


@given(st.binary(max_size=PAYLOAD_BYTES))
def test_a_payload_that_fits_arrives_with_it(raw: bytes) -> None:
    payload = torch.tensor(list(raw), dtype=torch.uint8)
    arrived = _round_trip(Header("all_gather", 1, len(raw), len(raw), len(raw), 2, payload=payload))
    assert (bytes(arrived.payload.numpy()) if arrived.payload is not None else b"") == raw
    assert arrived.refusal == ""


@pytest.mark.parametrize("length", [PAYLOAD_BYTES, PAYLOAD_BYTES + 1, 5 * PAYLOAD_BYTES])
def test_a_payload_travels_in_the_header_only_if_it_fits(length: int) -> None:
    payload = torch.arange(length).to(torch.uint8)
    arrived = _round_trip(Header("all_gather", 1, length, 0, length, 2, payload=payload))
    assert arrived.sends == length
    if length > PAYLOAD_BYTES:
        assert arrived.payload is None
    else:
        assert arrived.payload is not None
        assert torch.equal(arrived.payload, payload)


@pytest.mark.slow
@given(st.text(max_size=300).filter(bool))
@example("x" * PAYLOAD_BYTES)
@example("x" * (PAYLOAD_BYTES + 1))
@example("\u00e9" * PAYLOAD_BYTES)
def test_a_refusal_arrives_as_far_as_there_is_room(text: str) -> None:
    try:
        raw = text.encode()
    except UnicodeEncodeError:  # half a character, which no error message holds
        return
    arrived = _round_trip(Header("all_to_all", 3, 5, 5, 5, 0, text, torch.ones(5, dtype=torch.uint8)))
    assert arrived.payload is None
    assert arrived.refusal == raw[:PAYLOAD_BYTES].decode(errors="replace")
    assert len(arrived.refusal.encode()) >= min(len(raw), PAYLOAD_BYTES) - 3 or "\ufffd" in arrived.refusal


def test_a_payload_of_the_device_does_not_travel_with_it() -> None:
    arrived = _round_trip(Header("all_to_all", 3, 5, 5, 5, 0))
    assert arrived.sends == 5


def test_what_is_no_header_is_not_taken_for_one() -> None:
    packed = Header("all_gather", 1, 0, 0, 0, 2).pack()
    packed[0] += 1
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        _unpack(packed)


def test_headers_share_no_memory() -> None:
    first = Header("all_gather", 1, 3, 3, 3, 2, payload=torch.tensor([1, 2, 3], dtype=torch.uint8))
    packed, other = first.pack(), replace(first, sequence_number=2).pack()
    other.zero_()
    assert _unpack(packed).sequence_number == 1
