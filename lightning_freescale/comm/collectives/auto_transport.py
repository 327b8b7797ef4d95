"""``transport="auto"``: torch's own backend moves CUDA tensors until a transport has proved itself, in this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotDone
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.collectives.executor import CollectiveExecutor
from lightning_freescale.comm.collectives.native import NativeBackends
from lightning_freescale.comm.collectives.proof import AllToAll, Proof, ProofDevice, Verdict, Wait
from lightning_freescale.comm.transports.selection import TransportRefused, auto_candidates, refusal
from lightning_freescale.comm.transports.topology import Topology
from lightning_freescale.comm.transports.transfer import RankBuffers

_MESSAGE_BYTES = 2048
_MOST_SECONDS = 60.0
"""What a candidate may take for its trial, if half the timeout of the group is not less."""
_verdicts: dict[tuple[Any, ...], str] = {}
"""What was chosen in this process, for ranks, their GPUs and sizes: a lane of another collection need not measure again."""
_log = logging.getLogger(__name__)


def settle_transport(
    backend_opts: Any, lane: CollectiveExecutor, backends: NativeBackends, make_device: Callable[[], ProofDevice]
) -> None:
    """Give an ``"auto"`` lane of CUDA tensors the transport that has proved itself, if there is one. Collective.

    Each candidate runs on a lane of its own, so what fails there ends that lane alone. What was chosen, and why, is one line
    in the log of the group's first rank. ``make_device`` is called where there is something to measure. Not tested on GPU.

    Raises:
        DistBackendError: a rank does not come, or torch's own backend fails.
    """
    topology, first = lane.topology, backend_opts.group_rank == 0
    sizes = lane.options.chunk_bytes, lane.options.max_ctas
    key = topology.ranks, tuple(each.gpu for each in topology.hardware), sizes, lane.options.priority
    known = {said["known"] for said in gather_over(lane.p2p.open(), {"known": _verdicts.get(key, "")})}
    if len(known) > 1 or known == {""}:  # all ranks measure, also those that knew
        if first:
            _tell_of_hidden_gpus(topology)
        with backends.hiding_nccl():
            device = make_device()
            verdict = _prove(backend_opts, lane, backends, device)
            device.release()
        _verdicts[key] = verdict.chosen
        if first:
            _tell(verdict, topology, backends)
    if _verdicts[key] == "native":
        return
    try:
        lane.set_up_transport(_verdicts[key])
    except TransportRefused as error:  # on all ranks
        if first:
            _log.warning("transport='auto' leaves this lane to torch's own backend: %s", error)


def gather_over(gloo: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what every rank says, over the lane's connections; texts may be cut."""
    short = {name: value[: _MESSAGE_BYTES // 8] if isinstance(value, str) else value for name, value in mine.items()}
    raw = json.dumps(short, ensure_ascii=False).encode(errors="replace")
    sent = torch.frombuffer(bytearray(raw.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
    came = [torch.empty_like(sent) for _ in range(gloo.size())]
    gloo.allgather([came], [sent]).wait()
    return [json.loads(each.numpy().tobytes()) for each in came]


def _prove(backend_opts: Any, lane: CollectiveExecutor, backends: NativeBackends, device: ProofDevice) -> Verdict:
    """Check and measure all candidates on lanes of their own, and close these."""
    trials: dict[str, CollectiveExecutor] = {}
    refused: dict[str, str] = {}
    limit = min(_MOST_SECONDS, backend_opts.timeout.total_seconds() / 2)  # a rank that waits for another one waits longer
    try:
        for name in auto_candidates(lane.topology):
            options = replace(lane.options, transport=name, name=f"{name} on trial")
            store = dist.PrefixStore(f"{name} on trial", backend_opts.store)
            opts = {each: getattr(backend_opts, each) for each in ("group_rank", "group_size", "timeout", "group_id")}
            ranks = backend_opts.global_ranks_in_group
            try:
                trials[name] = CollectiveExecutor(SimpleNamespace(store=store, global_ranks_in_group=ranks, **opts), options)
            except TransportRefused as error:  # on all ranks
                refused[name] = str(error)
        candidates: dict[str, AllToAll] = {name: partial(_begin, trial, limit) for name, trial in trials.items()}
        verdict = Proof(
            native=partial(_begin_native, backends),
            candidates=candidates,
            device=device,
            rank=backend_opts.group_rank,
            ranks=list(lane.topology.ranks),
            gather=partial(gather_over, lane.p2p.open()),
            limit=limit,
            chunk_bytes=lane.options.chunk_bytes,
        ).run()
        return replace(verdict, failures={**refused, **verdict.failures})
    finally:
        for trial in trials.values():
            trial.abort()


def _begin_native(backends: NativeBackends, received: Tensor, send: Tensor, gets: list[int], gives: list[int]) -> Wait:
    work = backends.call("alltoall_base", received, send, gets, gives, dist.AllToAllOptions())
    return lambda seconds: work.wait()  # torch's own watch over the group's timeout


def _begin(trial: CollectiveExecutor, limit: float, received: Tensor, send: Tensor, gets: list[int], gives: list[int]) -> Wait:
    outgoing = partial(RankBuffers.from_tensor, "input", send, gives)
    incoming = partial(RankBuffers.from_tensor, "output", received, gets)
    done = trial.run("all_to_all_single", outgoing, incoming, timedelta(seconds=limit), background=True)

    def wait(seconds: float) -> None:
        try:
            error = done.exception(seconds)
        except NotDone:
            raise TimeoutError from None  # in Python 3.10 that is another class
        if error is not None:
            raise error

    return wait


def _tell(verdict: Verdict, topology: Topology, backends: NativeBackends) -> None:
    for name, failure in verdict.failures.items():
        _log.warning("transport='auto' does not take %r, which failed its trial: %s", name, failure)
    native = "NCCL" if backends.uses_nccl else "gloo"
    measured = [f"{native if name == 'native' else name} {value:.2f} ms" for name, value in verdict.milliseconds.items()]
    refusals = {kind: refusal(kind, topology) for kind in ("peer", "two-level")}
    reasons = [f"{kind!r} {reason}" for kind, reason in refusals.items()] if all(refusals.values()) else []
    _log.info(
        "transport='auto' takes %s for ranks %s; exchange and compute beside it, slowest rank: %s%s",
        native if verdict.chosen == "native" else repr(verdict.chosen),
        ", ".join(map(str, topology.ranks)),
        ", ".join(measured) or "not measured",
        "".join(f"; {reason}" for reason in reasons),
    )


def _tell_of_hidden_gpus(topology: Topology) -> None:
    alone = topology.find_alone()
    if alone and all(refusal(kind, topology) for kind in ("peer", "two-level")):
        _warn_of_hidden_gpus(alone)


@cache
def _warn_of_hidden_gpus(alone: str) -> None:
    _log.warning(
        "transport='auto' cannot try copies between the GPUs of a host, because %s see one GPU each: let every process see all "
        "GPUs of its host and call torch.cuda.set_device (SLURM: --gpu-bind=none; Ray: "
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1), or pass transport='native'",
        alone,
    )
