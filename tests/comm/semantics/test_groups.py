"""Methods of a group under all names of c10d, subgroups, the default group, and Lightning's DDP on it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch._C._distributed_c10d import AllgatherOptions

from lightning_freescale.comm import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.process_group import _DELEGATED, ProcessGroupFreeScale
from lightning_freescale.testing import _reserved_port, run_distributed
from tests.helpers.both_groups import SMALL, TIMEOUT, Case, Side, assert_same_as_gloo, differs, named
from tests.helpers.comm_groups import make_group
from tests.helpers.plain_modules import Plain, fit


def _in_subgroup(group: Any, first: int) -> Any:
    """Call methods with roots and peers by global and group rank. ``first`` is the global rank of the group's rank 0."""
    side = Side(group)
    told, retold, given = side.numbers(3), side.numbers(400), side.numbers(600 * side.size)
    dist.broadcast(told, src=first, group=group)
    dist.broadcast(retold, group_src=side.size - 1, group=group)
    out, gathered = side.blank(600 * side.size), side.blank(600 * side.size * side.size)
    dist.all_to_all_single(out, given, group=group)
    dist.all_gather_into_tensor(gathered, given, group=group)
    objects: list[Any] = [None] * side.size
    dist.all_gather_object(objects, dist.get_rank(), group=group)
    passed = torch.full((1,), float(side.rank))
    if side.rank == 0:
        dist.send(passed, dst=dist.get_global_rank(group, side.size - 1), group=group)
    elif side.rank == side.size - 1:
        assert dist.recv(passed, src=first, group=group) == first
    return told, retold, out, gathered, passed, objects


def _subgroups(memberships: list[list[int]]) -> list[str]:
    found, mine = [], dist.get_rank()
    for ranks in memberships:
        group, gloo = make_group(ranks=ranks, **SMALL), dist.new_group(ranks, backend="gloo", timeout=TIMEOUT)
        assert (group is dist.GroupMember.NON_GROUP_MEMBER) == (mine not in ranks)
        if mine in ranks:
            assert dist.get_process_group_ranks(group) == ranks and dist.get_rank(group) == ranks.index(mine)
            assert dist.get_world_size(group) == len(ranks) == group.size()
            found.append(differs(_in_subgroup(group, ranks[0]), _in_subgroup(gloo, ranks[0])))
            assert found[-1] or _in_subgroup(group, ranks[0])[-1] == ranks
    return [difference for difference in found if difference]


@pytest.mark.parametrize(
    ("size", "memberships"),
    [(3, [[1, 2], [0, 1], [0, 2]]), pytest.param(4, [[0, 2], [1, 3], [1, 2, 3], [2, 3], [0, 1]], marks=pytest.mark.slow)],
)
def test_subgroups_are_those_of_gloo(size: int, memberships: list[list[int]]) -> None:
    assert run_distributed(_subgroups, size, memberships, timeout=60) == [[]] * size


def _default(ports: list[int]) -> list[Any]:
    """Run twice, because a default group may be destroyed and created again."""
    told: list[Any] = []
    for port in ports:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(
            "freescale",
            init_method=address,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=TIMEOUT,
            pg_options=ProcessGroupFreeScaleOptions(**SMALL),
        )
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroupFreeScale) and group.options.chunk_bytes == SMALL["chunk_bytes"]
        told.append((dist.get_backend(), group.name(), dist.get_rank(), dist.get_world_size(), bool(group.group_name)))
        # torch uses CPU tensors for a backend that it takes for gloo
        assert group._get_backend_name() == group._get_backend(torch.device("cpu")).name() == "gloo"
        assert group.getBackendName() == "freescale" and {device.type for device in group._device_types} == {"cpu"}
        gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)
        half = dist.new_group([0, 1])  # of the default group's backend
        assert isinstance(half, ProcessGroupFreeScale) == (dist.get_rank() < 2)
        told.append(differs(_in_subgroup(group, 0), _in_subgroup(gloo, 0)))
        values = torch.ones(2)
        dist.all_reduce(values)
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()
        told.append(values.tolist())
    return told


def test_as_default_group() -> None:
    with _reserved_port() as first, _reserved_port() as second:
        of_ranks = run_distributed(_default, 3, [first, second], init=False, timeout=60)
    for rank, told in enumerate(of_ranks):
        assert told == [("freescale", "freescale", rank, 3, True), "", [3.0] * 2] * 2


def _fit(backend: str) -> Any:
    torch.manual_seed(int(os.environ["RANK"]))  # different weights per rank, which DDP replaces by those of rank 0
    module, strategy = Plain(), DDPStrategy(process_group_backend=backend, timeout=TIMEOUT)
    before = module.layer.weight.tolist()
    fitted = fit(module, [], steps=6, devices=2, strategy=strategy, max_epochs=2)
    assert isinstance(dist.group.WORLD, ProcessGroupFreeScale) == (backend == "freescale")
    logged = {name: value.item() for name, value in fitted.callback_metrics.items()}
    assert module.layer.weight.tolist() != before and len(logged) == 2, "weights must move, or equality means nothing"
    return logged, list(module.state_dict().values())


def test_lightnings_ddp_given_the_backends_name_trains_what_it_trains_over_gloo() -> None:
    mine, gloo = (run_distributed(_fit, 2, backend, init=False, timeout=90) for backend in ("freescale", "gloo"))
    assert [differs(*pair) for pair in zip(mine, gloo)] == ["", ""] and differs(gloo[0][1], gloo[1][1]) == ""


METHODS: list[Case] = []


def _present(side: Side, *names: str) -> list[Any]:
    """Check methods under the old and the new names of torch."""
    found = [getattr(side.group, name) for name in names if hasattr(dist.ProcessGroup, name)]
    assert found
    return found


@named(METHODS)
def all_to_all(side: Side) -> Any:
    results = []
    incoming, outgoing = ([(a * k + b * side.rank) % 4 for k in range(side.size)] for a, b in ((3, 1), (1, 3)))
    for method in _present(side, "alltoall_base", "all_to_all_single"):
        for options in ((), (dist.AllToAllOptions(),), (TIMEOUT,)):
            given, out = side.numbers(sum(outgoing), 3), side.blank(sum(incoming), 3)
            method(out, given, incoming, outgoing, *options).wait()
            results += [out, given]
        out, given = side.blank(side.size), side.numbers(side.size)
        method(out, given, [], []).wait()
        results.append(out)
    lists = [[side.blank(4) for _ in range(side.size)] for _ in range(2)]
    given = [side.numbers(4) for _ in range(side.size)]
    side.group.alltoall(lists[0], given).wait()
    side.group.alltoall(lists[1], given, dist.AllToAllOptions()).wait()
    return results, lists


@named(METHODS)
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
    lists = [[side.blank(4) for _ in range(side.size)] for _ in range(2)]
    coalesced = [[side.blank(4), side.blank(500)] for _ in range(side.size)]
    pair = [side.numbers(4), side.numbers(500)]
    side.group.allgather([lists[0]], pair[:1]).wait()
    side.group.allgather(lists[1], pair[0], TIMEOUT).wait()  # the short form
    side.group.allgather_coalesced(coalesced, pair).wait()
    return results, lists, coalesced


def test_methods_of_the_group_are_those_of_gloo() -> None:
    assert_same_as_gloo(METHODS, 3, **SMALL)


def test_other_collectives_are_those_of_torchs_own_backend() -> None:
    called: list[Any] = []
    group: Any = SimpleNamespace(_backends=SimpleNamespace(call=lambda *args, **options: called.append((args, options))))
    offered = [name for name in _DELEGATED if hasattr(dist.ProcessGroup, name)]  # some came with torch 2.14
    for name in offered:
        getattr(ProcessGroupFreeScale, name)(group, 1, opts=2)
    assert called == [((name, 1), {"opts": 2}) for name in offered] and len(offered) >= 12


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
    """Check that no method runs in C++ while it holds the GIL, which causes a deadlock with gloo's own thread."""
    offered = {name for name in vars(dist.ProcessGroup) if not name.startswith("__")}
    overridden = {
        name
        for kind in ProcessGroupFreeScale.__mro__[: ProcessGroupFreeScale.__mro__.index(dist.ProcessGroup)]
        for name in vars(kind)
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
    "monitored_barrier": (),
}


def test_what_would_pass_by_the_lane_is_refused() -> None:
    """Check refusals: hooks would miss the lane's collectives, and groups that torch creates from this one have no lane."""

    def run() -> bool:
        group = make_group()
        for name in REFUSED:
            if hasattr(dist.ProcessGroup, name):  # some came with torch 2.14
                with pytest.raises(ValueError, match=f"freescale {name}: .*'gloo' or 'nccl'"):
                    getattr(group, name)(*REFUSED[name])
        return getattr(group, "supports_reconfigure", False)

    assert run_distributed(run, 2) == [False, False]
