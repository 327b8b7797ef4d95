"""Every collective delivers the same bits as gloo's, for all sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from lightning_freescale.testing import run_distributed
from tests.helpers.both_groups import SMALL, UNTOUCHED, Case, Side, assert_same_as_gloo, bits, differs, named
from tests.helpers.comm_groups import make_group

CASES: list[Case] = []
ROWS: dict[str, Callable[[int, int, int], int]] = {
    "even": lambda source, target, size: 2,
    "uneven": lambda source, target, size: (3 * source + 2 * target) % 4 + 1,
    "pairs_without": lambda source, target, size: (source + 2 * target) % 3,
    "silent_rank": lambda source, target, size: 0 if source == 0 else target + 1,
    "deaf_rank": lambda source, target, size: 0 if target == size - 1 else source + 1,
    "own_only": lambda source, target, size: 3 if source == target else 0,
    "one_way": lambda source, target, size: 4 if source < target else 0,
    "nothing": lambda source, target, size: 0,
    "one_large": lambda source, target, size: 3000 if (source, target) == (0, size - 1) else 1,
}
SHAPES: list[tuple[int, ...]] = [(4,), (), (0,), (2, 3), (400, 3)]


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _split(side: Side, pattern: str) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that this rank gets from every rank, and sends to every rank."""
    rows, everyone = ROWS[pattern], range(side.size)
    return [rows(k, side.rank, side.size) for k in everyone], [rows(side.rank, k, side.size) for k in everyone]


def _blanks(side: Side, shape: tuple[int, ...]) -> list[Tensor]:
    return [side.blank(*shape) for _ in range(side.size)]


@named(CASES)
def all_to_all_single(side: Side) -> Any:
    results = {}
    for pattern, shape, later in product(ROWS, [(), (3,), (2, 1, 5), (0,)], (False, True)):
        received, sent = _split(side, pattern)
        given, out = side.numbers(sum(sent), *shape), side.blank(sum(received), *shape)
        _wait(dist.all_to_all_single(out, given, received, sent, group=side.group, async_op=later))
        results[f"{pattern} {shape} {later}"] = out, given
    for splits, rows, shape in product((None, []), (1, 300), [(), (3,), (0,)]):
        given, out = side.numbers(rows * side.size, *shape), side.blank(rows * side.size, *shape)
        dist.all_to_all_single(out, given, splits, splits, group=side.group)
        results[f"{splits} {rows} {shape}"] = out, given
    for length in (*range(941, 949), 999, 1001, 2000):  # around the size of the first message and of a chunk
        given, out = (make(length * side.size, dtype=torch.uint8) for make in (side.numbers, side.blank))
        dist.all_to_all_single(out, given, group=side.group)
        results[f"{length} bytes"] = out
    for name in ("input_split_sizes", "output_split_sizes"):  # equal parts in one direction may be omitted
        out = side.blank(2 * side.size)
        dist.all_to_all_single(out, side.numbers(2 * side.size), group=side.group, **{name: [2] * side.size})
        results[name] = out
    return results


@named(CASES)
def all_to_all_of_lists(side: Side) -> Any:
    results = []
    for shape, later in product([(), (5,), (300, 2), (0,)], (False, True)):
        given, out = [side.numbers(*shape) for _ in range(side.size)], _blanks(side, shape)
        _wait(dist.all_to_all(out, given, group=side.group, async_op=later))
        results += [*out, *given]
    return results


@named(CASES)
def gathers(side: Side) -> Any:
    results = []
    for shape, later in product(SHAPES, (False, True)):
        given, out = side.numbers(*shape), _blanks(side, shape)
        _wait(dist.all_gather(out, given, group=side.group, async_op=later))
        results += [*out, given]
    for shape, later in product([(4,), (2, 3), (0, 2), (400, 3)], (False, True)):
        given, out = side.numbers(*shape), side.blank(side.size * shape[0], *shape[1:])
        _wait(dist.all_gather_into_tensor(out, given, group=side.group, async_op=later))
        results += [out, given]
    pair = [side.numbers(3), side.numbers(2, 300)]
    coalesced = [[side.blank(3), side.blank(2, 300)] for _ in range(side.size)]
    dist.all_gather_coalesced(coalesced, pair, group=side.group)
    out = side.blank(side.size * 300, 2)  # the input is a part of the output, as for sharded parameters
    mine = out[side.rank * 300 : (side.rank + 1) * 300].copy_(side.numbers(300, 2))
    dist.all_gather_into_tensor(out, mine, group=side.group)
    return results, coalesced, out


@named(CASES)
def nothing(side: Side) -> Any:
    """Check empty tensors of all shapes, and with strides of 0, as NumPy makes them."""
    results, n = [], side.size
    for shape in [(0,), (0, 3), (2, 0)]:
        given, listed, gathered = side.numbers(*shape), _blanks(side, shape), side.blank(n * shape[0], *shape[1:])
        pairs = [[side.blank(*shape)] for _ in range(n)]
        side.group.allgather_coalesced(pairs, [given]).wait()
        side.group.allgather_into_tensor_coalesced([gathered], [given]).wait()
        out, sent = side.blank(n * shape[0], *shape[1:]), side.numbers(n * shape[0], *shape[1:])
        dist.all_to_all_single(out, sent, [shape[0]] * n, [shape[0]] * n, group=side.group)
        dist.all_to_all(listed, _blanks(side, shape), group=side.group)
        results += [*listed, gathered, pairs, out]
    empty = torch.from_numpy(np.empty(0))
    dist.all_gather([torch.from_numpy(np.empty(0))] * n, empty, group=side.group, async_op=True).wait()
    return results


@named(CASES)
def one_to_all_and_all_to_one(side: Side) -> Any:
    results = []
    for root, shape in product(range(side.size), SHAPES):
        given, out, told = side.numbers(*shape), _blanks(side, shape), side.numbers(*shape)
        here, later = side.rank == root, root == 0
        share, parts = side.blank(*shape), [side.numbers(*shape) for _ in range(side.size)]
        dist.gather(given, out if here else None, group=side.group, group_dst=root)
        _wait(dist.scatter(share, parts if here else None, group=side.group, group_src=root, async_op=later))
        _wait(dist.broadcast(told, group_src=root, group=side.group, async_op=later))
        dist.reduce(given, group_dst=root, op=dist.ReduceOp.MAX, group=side.group)
        results += [*out, share, told, *([given] if here else [])]
    return results


@named(CASES)
def reductions(side: Side) -> Any:
    results = []
    for op, later in product(("SUM", "AVG", "MAX", "BAND"), (False, True)):
        tensor = side.numbers(3000, dtype=torch.int64 if op == "BAND" else torch.float32)
        _wait(dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), group=side.group, async_op=later))
        tensors, given, out = [side.numbers(5), side.numbers(2, 300)], side.numbers(300 * side.size, 2), side.blank(300, 2)
        with warnings.catch_warnings(action="ignore"):
            _wait(dist.all_reduce_coalesced(tensors, group=side.group, async_op=later))
        _wait(dist.reduce_scatter_tensor(out, given, group=side.group, async_op=later))
        parts, mine = [side.numbers(k + 1, 2) for k in range(side.size)], side.blank(side.rank + 1, 2)
        _wait(dist.reduce_scatter(mine, parts, group=side.group, async_op=later))
        results += [tensor, *tensors, out, mine]
    return results


@named(CASES)
def coalescing_manager(side: Side) -> Any:
    """Check several collectives in flight, as FSDP issues them."""
    gathered = [(side.blank(side.size * n), side.numbers(n)) for n in (1, 3, 400)]
    scattered = [(side.blank(n), side.numbers(side.size * n)) for n in (1, 3, 400)]
    for call, pairs in ((dist.all_gather_into_tensor, gathered), (dist.reduce_scatter_tensor, scattered)):
        with dist.distributed_c10d._coalescing_manager(group=side.group, async_ops=True) as issued:
            for out, given in pairs:
                call(out, given, group=side.group)
        issued.wait()
    return gathered, scattered


@named(CASES)
def recv_from_any_rank(side: Side) -> Any:
    out, told = side.blank(3), []
    if side.rank:
        dist.send(side.numbers(3), group_dst=0, group=side.group, tag=5)
    for _ in range(0 if side.rank else side.size - 1):
        source = dist.recv(out, group=side.group, tag=5)
        told.append((source, out.tolist()))
    return sorted(told)


@named(CASES)
def what_is_refused(side: Side) -> Any:
    with pytest.raises(RuntimeError, match="PREMUL_SUM"):
        dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(2.0), group=side.group)
    if dist.get_backend(side.group) != "gloo":  # only for gloo: its messages would be mixed up with those of the lane
        with pytest.raises(ValueError, match=r"GLOO|gloo"):  # up to torch 2.13 torch itself says so
            dist.monitored_barrier(side.group)
    tensor = side.numbers(3)
    dist.all_reduce(tensor, group=side.group)
    return tensor


def _now(result: Any) -> Any:
    return [_now(one) for one in result] if isinstance(result, (list, tuple)) else functional.wait_tensor(result).clone()


@named(CASES)
def functional_moves(side: Side) -> Any:
    results = []
    for rows, pattern in ((1, "pairs_without"), (200, "one_large")):
        received, sent = _split(side, pattern)
        results.append(functional.all_to_all_single(side.numbers(sum(sent), 3), received, sent, side.group))
        results.append(functional.all_to_all_single(side.numbers(rows * side.size, 3), None, None, side.group))
    results += [functional.all_gather_tensor(side.numbers(2, 300), dim, side.group) for dim in (0, 1)]
    pair = [side.numbers(4), side.numbers(300, 2)]
    results += functional.all_gather_into_tensor_coalesced(pair, side.group)
    for name in ("all_gather_single", "all_gather_single_coalesced"):
        if name == "all_gather_single" and hasattr(functional, name):
            results.append(functional.all_gather_single(side.numbers(2, 300), 0, side.group))
        elif hasattr(functional, name):
            results += functional.all_gather_single_coalesced(pair, side.group)
    return _now(results)


@named(CASES)
def functional_gradients(side: Side) -> Any:
    """Send embeddings and return them. The gradients of the copies return, too."""
    received, sent = _split(side, "one_large")
    leaf = side.numbers(sum(sent), 2).requires_grad_()
    there = functional.all_to_all_single_autograd(leaf * 2, received, sent, side.group)
    back = functional.all_to_all_single_autograd(there * there, sent, received, side.group)
    (back * side.numbers(*back.shape)).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().max() > 0
    return back.detach(), leaf.grad


def _all(side: Side, given: Any, out: Any, gathered: Any, listed: Any, async_op: bool) -> None:
    works = [
        dist.all_to_all_single(out, given, group=side.group, async_op=async_op),
        dist.all_gather_into_tensor(gathered, given, group=side.group, async_op=async_op),
        dist.all_gather(listed, given, group=side.group, async_op=async_op),
    ]
    for work in works if async_op else []:
        work.wait()


@named(CASES)
def parts_of_buffers(side: Side) -> Any:
    """Check that the memory around the output does not change."""
    results, n = [], side.size
    for async_op in (False, True):
        buffers = [side.blank(300 * n * n + 20, 2) for _ in range(3)]
        given = side.numbers(300 * n + 20, 2)[7 : 300 * n + 7]
        out, gathered = buffers[0][3 : 300 * n + 3], buffers[1][5 : 300 * n * n + 5]
        listed = list(buffers[2][11 : 300 * n * n + 11].split(300 * n))
        _all(side, given, out, gathered, listed, async_op)
        assert (buffers[0][:3] == UNTOUCHED).all() and (buffers[0][300 * n + 3 :] == UNTOUCHED).all()
        results += buffers
    for offset in (1, 2, 3, 5):  # bytes with any alignment
        out, given = side.blank(2000 * n, dtype=torch.uint8), side.numbers(2000 * n, dtype=torch.uint8)
        part = slice(offset, offset + 1500 * n)
        dist.all_to_all_single(out[part], given[part], group=side.group)
        results += [out, given]
    return results


@named(CASES)
def parameters_and_inference_tensors(side: Side) -> Any:
    """Check leaves that require grad, and inference mode, which belongs to a thread and in which Lightning validates."""
    results, n = [], side.size
    for inference, (rows, async_op) in product((False, True), ((1, True), (300, False), (300, True))):
        with torch.inference_mode(inference), torch.no_grad():  # gloo's all-gather requires it
            made = [side.numbers(rows * n, 2), *(side.blank(rows * n * k, 2) for k in (1, n, *([1] * n)))]
            given, out, gathered, *listed = made if inference else map(torch.nn.Parameter, made)
            _all(side, given, out, gathered, listed, async_op)
        for tensor in (given, out, gathered, *listed):
            assert tensor.grad_fn is None and tensor.requires_grad != inference and tensor.is_inference() == inference
            results.append(tensor.tolist())
    return results


@pytest.mark.parametrize(
    ("size", "options"),
    [(2, {}), (3, SMALL), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, {}), (3, {}), (4, SMALL)])],
)
def test_collectives_are_those_of_gloo(size: int, options: dict[str, Any]) -> None:
    assert_same_as_gloo(CASES, size, **options)


def _not_of_gloo(options: dict[str, Any]) -> list[str]:
    """Return the differences from the reference for tensors that gloo refuses."""
    side, wrong, n = Side(make_group(**options)), [], dist.get_world_size()
    for pattern, later in product(ROWS, (False, True)):  # lists of unequal tensors; the same rows in one are the reference
        received, sent = _split(side, pattern)
        given, out, expected = (
            side.numbers(sum(sent), 3),
            [side.blank(rows, 3) for rows in received],
            side.blank(sum(received), 3),
        )
        work = dist.all_to_all(out, list(given.split(sent)), group=side.group, async_op=later)
        if later and not (work.wait() and work.get_future().wait()[0] is out[0]):
            wrong.append(f"future of {pattern}")
        dist.all_to_all_single(expected, given, received, sent)
        if not torch.equal(torch.cat(out), expected):
            wrong.append(pattern)
    given, stacked, listed = side.numbers(2, 300), side.blank(n, 2, 300), _blanks(side, (2, 300))
    everyone = [side.numbers(k * 200, 2, rank=k) for k in range(n)]
    out = [torch.full_like(part, 77) for part in everyone]
    if options != {"transport": "native"}:  # native is gloo
        dist.all_gather_into_tensor(stacked, given, group=side.group)
        dist.all_gather(listed, given)
        dist.all_gather(out, everyone[side.rank], group=side.group)
        wrong += [] if torch.equal(stacked, torch.stack(listed)) else ["stacked output"]
        wrong += [] if all(map(torch.equal, out, everyone)) else ["unequal tensors"]
    for later in (False, True):  # Lightning averages integers if the backend is not gloo
        mean = torch.tensor([side.rank + 1, -5, 7 * side.rank])
        _wait(dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=side.group, async_op=later))
        wrong += [] if mean.tolist() == [(n + 1) // 2, -5, 7 * (n - 1) // 2] else [f"mean {mean.tolist()}"]
    return wrong


@pytest.mark.parametrize(("size", "options"), [(3, SMALL), (2, {"transport": "native"})])
def test_what_gloo_refuses_arrives(size: int, options: dict[str, Any]) -> None:
    assert run_distributed(_not_of_gloo, size, options) == [[]] * size


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def _typed() -> list[str]:
    """Return the differences from the same bytes sent by gloo."""
    side, rank, size = Side(make_group(**SMALL)), dist.get_rank(), dist.get_world_size()
    found = []
    for dtype, rows in ((dtype, rows) for dtype in DTYPES for rows in (1, 400)):
        sent, received = [rows + target for target in range(size)], [rows + rank] * size
        given, out = side.numbers(sum(sent), 3, dtype=dtype), torch.zeros(sum(received), 3, dtype=dtype)
        width, expected = 3 * dtype.itemsize, torch.zeros(3 * dtype.itemsize * sum(received), dtype=torch.uint8)
        dist.all_to_all_single(out, given, received, sent, group=side.group)
        dist.all_to_all_single(expected, bits(given), [n * width for n in received], [n * width for n in sent])
        mine = side.numbers(rows, 3, dtype=dtype)
        listed, gathered = [torch.zeros_like(mine) for _ in range(size)], torch.zeros(size * rows, 3, dtype=dtype)
        everyone = torch.zeros(size * mine.nbytes, dtype=torch.uint8)
        dist.all_gather(listed, mine, group=side.group)
        dist.all_gather_into_tensor(gathered, mine, group=side.group)
        dist.all_gather_into_tensor(everyone, bits(mine))
        pairs = [(out, expected), (torch.cat([bits(part) for part in listed]), everyone), (gathered, everyone)]
        found += [f"{dtype} {rows}: {difference}" for one, other in pairs if (difference := differs(bits(one), other))]
    # numbers that are equal to nothing or to others keep their bits: NaNs, -0.0, a subnormal
    odd = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 0x00000001], dtype=torch.int32)
    out = torch.zeros(size * len(odd))
    dist.all_to_all_single(out, odd.view(torch.float32).repeat(size), group=side.group)
    # numpy's empty results have strides of 0, and count as contiguous
    given, one = torch.ones(int(rank == 1)).as_strided((int(rank == 1),), (0,)), torch.zeros(int(rank == 0))
    dist.all_to_all_single(one, given, [0, len(one), 0], [len(given), 0, 0], group=side.group)
    found += [*differs(out.view(torch.int32), odd.repeat(size)), *(["stride 0"] if one.tolist() != [1.0] * len(one) else [])]
    return found


def test_every_type_arrives_bit_by_bit() -> None:
    assert run_distributed(_typed, 3, timeout=60) == [[]] * 3
