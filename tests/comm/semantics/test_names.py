"""The methods of a group, called as C10D names and names them, and what a new torch may add to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from lightning_freescale.comm.process_group import FreeScaleGroup
from lightning_freescale.testing import run_distributed
from tests.helpers.both_groups import SMALL, TIMEOUT, Case, Side, assert_same_as_gloo, make_group, named

CASES: list[Case] = []


def _present(side: Side, *names: str) -> list[Any]:
    """Methods that torch's own group has under one of its names, old or new."""
    found = [getattr(side.group, name) for name in names if hasattr(dist.ProcessGroup, name)]
    assert found
    return found


@named(CASES)
def all_to_all(side: Side) -> Any:
    results = []
    for method in _present(side, "alltoall_base", "all_to_all_single"):
        splits = [(3 * k + side.rank) % 4 for k in range(side.size)], [(3 * side.rank + k) % 4 for k in range(side.size)]
        for outgoing, incoming, options in [
            ([], [], ()),
            (splits[1], splits[0], ()),
            (splits[1], splits[0], (dist.AllToAllOptions(),)),
            (splits[1], splits[0], (TIMEOUT,)),
        ]:
            given = side.numbers(sum(outgoing) or side.size, 3)
            out = side.blank(sum(incoming) or side.size, 3)
            method(out, given, incoming, outgoing, *options).wait()
            results += [out, given]
        out, given = side.blank(side.size), side.numbers(side.size)
        method(output=out, input=given, output_split_sizes=[], input_split_sizes=[]).wait()
        results.append(out)
    for options in ((), (dist.AllToAllOptions(),)):
        listed = [side.blank(4) for _ in range(side.size)]
        side.group.alltoall(listed, [side.numbers(4) for _ in listed], *options).wait()
        results += listed
    return results


@named(CASES)
def all_to_all_by_keyword(side: Side) -> Any:
    """A timeout, and the list form's names."""
    out, listed = side.blank(side.size), [side.blank(4) for _ in range(side.size)]
    for method in _present(side, "all_to_all_single"):
        method(out, side.numbers(side.size), [], [], timeout=TIMEOUT).wait()
    side.group.alltoall(output_tensors=listed, input_tensors=[side.numbers(4) for _ in listed]).wait()
    return out, listed


@named(CASES)
def all_gather(side: Side) -> Any:
    results = []
    for method in _present(side, "_allgather_base", "all_gather_single"):
        for options in ((), (AllgatherOptions(),)):
            out, given = side.blank(2 * side.size, 3), side.numbers(2, 3)
            method(out, given, *options).wait()
            results += [out, given]
    for method in _present(side, "allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
        outs = [side.blank(n * side.size) for n in (2, 500)]
        method(outs, [side.numbers(n) for n in (2, 500)]).wait()
        results += outs
    listed = [side.blank(4) for _ in range(side.size)]
    side.group.allgather([listed], [side.numbers(4)]).wait()
    coalesced = [[side.blank(4), side.blank(500)] for _ in range(side.size)]
    side.group.allgather_coalesced(coalesced, [side.numbers(4), side.numbers(500)]).wait()
    return results, listed, coalesced


@named(CASES)
def all_gather_of_one_tensor(side: Side) -> Any:
    """The short form, with a timeout."""
    listed, again = ([side.blank(4) for _ in range(side.size)] for _ in range(2))
    side.group.allgather(listed, side.numbers(4)).wait()
    side.group.allgather(again, side.numbers(4), timeout=TIMEOUT).wait()
    return listed, again


@named(CASES)
def all_gather_by_keyword(side: Side) -> Any:
    listed, again = ([side.blank(4) for _ in range(side.size)] for _ in range(2))
    side.group.allgather(output_tensors=[listed], input_tensors=[side.numbers(4)]).wait()
    side.group.allgather(output_tensors=again, input_tensor=side.numbers(4)).wait()
    outs = [side.blank(n * side.size) for n in (2, 500)]
    for method in _present(side, "all_gather_single_coalesced"):
        method(outputs=outs, inputs=[side.numbers(n) for n in (2, 500)]).wait()
    coalesced = [[side.blank(4), side.blank(500)] for _ in range(side.size)]
    side.group.allgather_coalesced(output_lists=coalesced, input_list=[side.numbers(4), side.numbers(500)]).wait()
    return listed, again, outs, coalesced


@named(CASES)
def reductions(side: Side) -> Any:
    results = []
    for method in _present(side, "_reduce_scatter_base", "reduce_scatter_single"):
        out = side.blank(2, 3)
        method(out, side.numbers(2 * side.size, 3)).wait()
        results.append(out)
    for method in _present(side, "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
        outs = [side.blank(2), side.blank(5)]
        method(outs, [side.numbers(2 * side.size), side.numbers(5 * side.size)]).wait()
        results += outs
    parts, out = [side.numbers(4) for _ in range(side.size)], side.blank(4)
    side.group.reduce_scatter([out], [parts]).wait()
    tensors = [side.numbers(3), side.numbers(4)]
    side.group.allreduce([tensors[0]]).wait()
    side.group.allreduce(tensors[1], dist.ReduceOp.MAX).wait()
    pair = [side.numbers(3), side.numbers(4)]
    side.group.allreduce_coalesced(pair).wait()
    return results, out, tensors, pair


@named(CASES)
def from_a_root(side: Side) -> Any:
    told, total, share = side.numbers(3), side.numbers(3), side.blank(3)
    side.group.broadcast(told, 0).wait()
    side.group.reduce(total, 0).wait()
    side.group.scatter(share, [side.numbers(3) for _ in range(side.size)] if side.rank == 0 else [], 0).wait()
    parts = [side.blank(3) for _ in range(side.size)] if side.rank == 0 else []
    side.group.gather(parts, side.numbers(3), 0).wait()
    side.group.barrier().wait()
    return told, total if side.rank == 0 else None, share, parts


@named(CASES)
def gather_in_one_tensor(side: Side) -> Any:
    """From torch 2.14 on, under two names; NCCL has it, gloo does not."""
    for name in ("gather_into_tensor", "gather_single"):
        if hasattr(dist.ProcessGroup, name):
            with pytest.raises(RuntimeError, match="gloo does not support gather"):
                getattr(side.group, name)(side.blank(2 * side.size, 3), side.numbers(2, 3))
    side.group.allreduce([total := side.numbers(3)]).wait()
    return total


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_methods_of_the_group_are_those_of_gloo(case: Case) -> None:
    assert_same_as_gloo([case], 3, **SMALL)


NO_COLLECTIVES = {
    *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "_backend_id", "_device_types"),
    *("_get_backend", "_get_backend_name", "_has_hooks", "_id", "_pybind11_conduit_v1_", "_register_backend"),
    *("_register_on_completion_hook", "_set_default_backend", "_set_group_desc", "_set_group_name", "bound_device_id"),
    *("boxed", "unbox", "get_group_store", "group_desc", "group_name", "name", "rank", "size"),
    *("_get_sequence_number_for_group", "_set_sequence_number_for_group", "_enable_collectives_timing"),
    *("_wait_for_pending_works", "set_timeout", "use_pg_for_symm_mem_rendezvous"),
    *("_start_coalescing", "_end_coalescing"),  # gloo has neither
    *("get_backend", "_add_ephemeral_timeout", "supports_window"),  # from torch 2.14 on, as the next
    *("unregister_pre_hook", "unregister_post_hook", "unregister_abort_hook"),
}


def test_every_collective_of_torch_is_overridden() -> None:
    """One that is not runs in C++ while it holds the interpreter's lock, which deadlocks with gloo's own thread."""
    offered = {name for name in vars(dist.ProcessGroup) if not name.startswith("__")}
    overridden = {
        name for kind in FreeScaleGroup.__mro__[: FreeScaleGroup.__mro__.index(dist.ProcessGroup)] for name in vars(kind)
    }
    assert {"broadcast", "all_to_all_single", "barrier"} <= offered - NO_COLLECTIVES  # the names are those of torch
    assert offered - NO_COLLECTIVES - overridden == set()


REFUSED = {
    "split_group": ([0, 1],),
    "merge_remote_group": (None, 2),
    "new_window": (),
    "get_reconfigure_handle": (),
    "reconfigure": (None,),
    "register_pre_hook": (1, print),
    "register_post_hook": (1, print),
    "register_abort_hook": (1, print),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_pass_by_the_lane_is_refused(name: str) -> None:
    """Hooks would miss the lane's collectives, and groups that torch makes out of this one have no lane."""
    if not hasattr(dist.ProcessGroup, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")

    def run() -> bool:
        group = make_group()
        with pytest.raises(ValueError, match=f"freescale {name}: .* pass a group of backend 'gloo' or 'nccl'"):
            getattr(group, name)(*REFUSED[name])
        return getattr(group, "supports_reconfigure", False)

    assert run_distributed(run, 2) == [False, False]
