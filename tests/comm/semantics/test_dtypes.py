"""Every type that somebody sends arrives bit by bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.testing import run_distributed
from tests.helpers.both_groups import SMALL, Side, bits, differs, make_group

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
OF_GLOO = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.uint8}


def _sent(dtype: torch.dtype) -> dict[str, str]:
    """What differs from the same bytes sent by gloo."""
    side, width, rank, size = Side(make_group(**SMALL)), dtype.itemsize, dist.get_rank(), dist.get_world_size()
    found = {}
    for rows in (1, 7, 400):
        sent, received = [rows + target for target in range(size)], [rows + rank] * size
        given, out = side.numbers(sum(sent), 3, dtype=dtype), torch.zeros(sum(received), 3, dtype=dtype)
        expected = torch.zeros(3 * width * sum(received), dtype=torch.uint8)
        dist.all_to_all_single(out, given, received, sent, group=side.group)
        bytes_of = 3 * width
        dist.all_to_all_single(expected, bits(given), [n * bytes_of for n in received], [n * bytes_of for n in sent])
        found[f"all_to_all_single {rows}"] = differs(bits(out), expected)
        mine = side.numbers(rows, 3, dtype=dtype)
        listed, gathered = [torch.zeros_like(mine) for _ in range(size)], torch.zeros(size * rows, 3, dtype=dtype)
        expected = torch.zeros(size * mine.nbytes, dtype=torch.uint8)
        dist.all_gather(listed, mine, group=side.group)
        dist.all_gather_into_tensor(gathered, mine, group=side.group)
        dist.all_gather_into_tensor(expected, bits(mine))
        found[f"all_gather {rows}"] = differs(torch.cat([bits(part) for part in listed]), expected)
        found[f"all_gather_into_tensor {rows}"] = differs(bits(gathered), expected)
        if dtype in OF_GLOO:  # the rest is gloo's, and so are its types
            told, summed = side.numbers(rows, dtype=dtype), side.numbers(rows, dtype=dtype)
            both = [(told.clone(), summed.clone(), group) for group in (side.group, dist.group.WORLD)]
            for tensor, total, group in both:
                dist.broadcast(tensor, 0, group=group)
                dist.all_reduce(total, group=group)
            found[f"broadcast and all_reduce {rows}"] = differs(both[0][:2], both[1][:2])
    return {name: difference for name, difference in found.items() if difference}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_arrives(dtype: torch.dtype) -> None:
    assert run_distributed(_sent, 3, dtype, timeout=60) == [{}] * 3


def _special() -> bool:
    """Numbers that are equal to nothing or to others keep their bits."""
    group, size = make_group(), dist.get_world_size()
    odd = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 0x00000001], dtype=torch.int32)  # NaNs, -0.0, a subnormal
    given = odd.view(torch.float32).repeat(size)
    out, gathered = torch.zeros_like(given), torch.zeros(size * len(given))
    dist.all_to_all_single(out, given, group=group)
    dist.all_gather_into_tensor(gathered, given, group=group)
    return torch.equal(out.view(torch.int32), odd.repeat(size)) and torch.equal(bits(gathered), bits(given).repeat(size))


def test_bits_of_odd_numbers_arrive() -> None:
    assert run_distributed(_special, 2) == [True, True]
