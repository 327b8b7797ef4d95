"""A peer unpacks the same header that a rank has packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lightning_freescale.comm.collectives.handshake import HEADER_BYTES, PAYLOAD_BYTES, Header

NUMBERS = st.integers(0, 2**62)
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=32)


def _unpack(packed: Tensor) -> Header:
    assert packed.shape == (HEADER_BYTES,) and packed.dtype == torch.uint8
    return Header.unpack(bytearray(packed.numpy().tobytes()))


@given(NAMES, NUMBERS.map(lambda k: k + PAYLOAD_BYTES + 1), NUMBERS, NUMBERS, st.integers(0, 2**32 - 1), st.booleans())
@example("all_to_all", 5, 5, 5, 0, True)  # a payload on the device does not travel
def test_every_field_arrives(name: str, sends: int, expects: int, largest: int, dtype: int, on_gpu: bool) -> None:
    header = Header(name, sends, expects, largest, dtype, on_gpu=on_gpu)
    assert _unpack(header.pack()) == header


@pytest.mark.parametrize("length", [0, 1, 2, 500, PAYLOAD_BYTES, PAYLOAD_BYTES + 1, 5 * PAYLOAD_BYTES])
def test_a_payload_travels_in_the_header_only_if_it_fits(length: int) -> None:
    payload = torch.arange(length).to(torch.uint8)
    header = Header("all_gather", length, 0, length, 2, payload=payload)
    packed = header.pack()
    replace(header, largest=2).pack().zero_()  # headers share no memory
    arrived = _unpack(packed)
    assert (arrived.sends, arrived.largest, arrived.refusal) == (length, length, "")
    if 0 < length <= PAYLOAD_BYTES:
        assert arrived.payload is not None and torch.equal(arrived.payload, payload)
    else:
        assert arrived.payload is None


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300))
@example("x" * PAYLOAD_BYTES)
@example("x" * (PAYLOAD_BYTES + 1))
@example("\u00e9" * PAYLOAD_BYTES)
def test_a_refusal_arrives_as_far_as_it_fits(text: str) -> None:
    arrived = _unpack(Header("all_to_all", 5, 5, 5, 0, text, torch.ones(5, dtype=torch.uint8)).pack())
    assert arrived.payload is None
    assert arrived.refusal == text.encode()[:PAYLOAD_BYTES].decode(errors="replace")
