"""Which ranks share a host and which a fast link between GPUs, and which transport that makes possible."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch.distributed as dist

from lightning_freescale.comm.options import LaneOptions
from lightning_freescale.comm.p2p import GlooP2P
from lightning_freescale.comm.transports.base import Transport, TransportRefused
from lightning_freescale.comm.transports.build import build
from lightning_freescale.comm.transports.host.transport import HostTransport
from lightning_freescale.comm.transports.selection import decide
from lightning_freescale.comm.transports.station import RankHardware

_EQUAL = ("transport", "chunk_bytes", "pinned_bytes", "priority")
"""Options that every rank of a group must give alike."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Topology:
    """Where the ranks of a group are.

    Attributes:
        stations: of every rank of the group.
        ranks: their global ranks, for errors.
    """

    stations: tuple[RankHardware, ...]
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.stations)

    @property
    def hosts(self) -> dict[tuple[str, str], list[int]]:
        """By name and boot of every host its ranks in the group."""
        found: dict[tuple[str, str], list[int]] = {}
        for rank, station in enumerate(self.stations):
            found.setdefault((station.host, station.boot), []).append(rank)
        return found

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host."""
        return len(self.hosts) == 1

    @property
    def one_nvlink_domain(self) -> bool:
        """Whether every GPU reaches every other over NVLink. NVLink between hosts is not looked for."""
        return not self.unlinked(range(self.size))

    def unlinked(self, ranks: Sequence[int]) -> str:
        """Of these ranks the first two that are not in one NVLink domain, and why; empty if all are."""
        return next((gap for pair in combinations(ranks, 2) if (gap := self._gap(*pair))), "")

    def sharing(self) -> str:
        """The first two ranks that use the same GPU; empty if none do."""
        pairs = combinations(range(self.size), 2)
        return next((self._two(*pair) + " share a GPU" for pair in pairs if self._same_gpu(*pair)), "")

    def lacking(self, attribute: str) -> str:
        """Ranks on which an attribute of the station is empty; empty if there are none."""
        found = [rank for rank, station in zip(self.ranks, self.stations) if not getattr(station, attribute)]
        return f"{'rank' if len(found) == 1 else 'ranks'} {', '.join(map(str, found))}" if found else ""

    def _gap(self, a: int, b: int) -> str:
        one, other = self.stations[a], self.stations[b]
        if (one.host, one.boot) != (other.host, other.boot):
            return f"{self._two(a, b)} are on hosts {one.host} and {other.host}"
        if self._same_gpu(a, b):
            return "" if one.shares and other.shares else f"{self._two(a, b)} both use {one.place} of {one.host}"
        if one.gpu in other.links and other.gpu in one.links:
            return ""
        return f"no NVLink is seen between {self._two(a, b)} ({one.place} and {other.place} of {one.host})"

    def _same_gpu(self, a: int, b: int) -> bool:
        return self.stations[a].gpu == self.stations[b].gpu

    def _two(self, a: int, b: int) -> str:
        return f"ranks {self.ranks[a]} and {self.ranks[b]}"


def choose(options: LaneOptions, wire: GlooP2P, host: HostTransport, store: dist.Store, timeout: timedelta) -> Transport | None:
    """The transport for CUDA tensors; None for torch's own backend. Collective.

    Args:
        options: of this rank.
        wire: of the group.
        host: the transport that can always be had.
        store: that only this call uses, on every rank.
        timeout: how long to wait for the other ranks.

    Raises:
        ValueError: the ranks do not give the same options; on every rank.
        TransportRefused: the transport that ``options`` name cannot be had; on every rank.
        DistBackendError: a rank does not come.
    """
    here = RankHardware.here(cuda=options.transport not in ("host", "native"))
    mine = {"options": {name: getattr(options, name) for name in _EQUAL}, "station": asdict(here)}
    said = _tell("station", mine, wire, store, timeout)
    _compare([each["options"] for each in said], wire.ranks)
    topology = Topology(tuple(_station(each["station"]) for each in said), tuple(wire.ranks))
    kind = decide(options.transport, topology)
    if kind == "native":
        return None
    if kind == "host":
        return host
    near = next(ranks for ranks in topology.hosts.values() if wire.rank in ranks)
    transport, reason = build(kind, options, wire, host, near, dist.PrefixStore("build", store), timeout)
    failed = [f"rank {rank}: {text}" for rank, text in zip(wire.ranks, _tell("built", reason, wire, store, timeout)) if text]
    if not failed:
        return transport
    if transport is not None:
        transport.close()
    if options.transport != "auto":
        raise TransportRefused(f"transport={kind!r} could not be set up: {'; '.join(failed)}: pass 'host' or 'auto'")
    _log.warning("transport='auto' takes 'host', because %r could not be set up: %s", kind, "; ".join(failed))
    return host


def _tell(what: str, mine: Any, wire: GlooP2P, store: dist.Store, timeout: timedelta) -> list[Any]:
    """What every rank says."""
    keys = [f"{what}/{rank}" for rank in range(wire.size)]
    store.set(keys[wire.rank], json.dumps(mine))
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [str(rank) for rank, key in zip(wire.ranks, keys) if not store.check([key])]
        raise dist.DistBackendError(
            f"while a freescale group was made, rank {', '.join(missing)} did not come within {timeout.total_seconds():g} s"
        ) from error
    said = [json.loads(each) for each in store.multi_get(keys)]
    _part(f"{what}/read", wire.size, store, timeout)
    return said


def _part(key: str, size: int, store: dist.Store, timeout: timedelta) -> None:
    """Return once all ranks have read, as a rank that leaves on an error may take the store with it."""
    with suppress(RuntimeError):  # it is gone, and so all have read
        if store.add(key, 1) == size:
            store.set(f"{key} by all", "")
        store.wait([f"{key} by all"], timeout)


def _compare(given: list[dict[str, Any]], ranks: Sequence[int]) -> None:
    for name in _EQUAL:
        if any(options[name] != given[0][name] for options in given):
            told = ", ".join(f"{options[name]!r} on rank {rank}" for rank, options in zip(ranks, given))
            raise ValueError(f"LaneOptions differ between ranks, {name}= is {told}: pass the same options on every rank")


def _station(said: dict[str, Any]) -> RankHardware:
    return RankHardware(**{**said, "links": tuple(said["links"]), "nccl": tuple(said["nccl"])})
