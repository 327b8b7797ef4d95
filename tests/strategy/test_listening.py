"""Where a run listens: one socket a process group, on the interface of the group."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import Recommender, Samples, collate, fixed_loader, trainer

_LISTENS = "0A"
"""How Linux writes the state of a socket that listens."""


def _listening() -> list[str]:
    """Return the addresses at which this process listens over TCP."""
    ends = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            ends.add(os.readlink(f"/proc/self/fd/{name}"))
    rows = [row.split() for family in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]]
    return [_address(row[1].split(":")[0]) for row in rows if row[3] == _LISTENS and f"socket:[{row[9]}]" in ends]


def _address(text: str) -> str:
    words = [struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def _interfaces() -> dict[str, str]:
    """Return the addresses of the interfaces that have one."""
    found = {}
    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            address = fcntl.ioctl(end.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            found[name] = socket.inet_ntoa(address[20:24])
    return found


class _Counts(L.Callback):
    """Keeps where the rank listens at the end of each step."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(_listening())


def _fit(planned: bool, folder: str | None) -> list[list[str]]:
    counts = _Counts()
    callbacks = [counts, *([] if folder is None else [BubbleProfiler(folder, verbose=False)])]
    data = Samples(16)
    loaded = FreeScaleDataModule(data, data.lengths, 2, collate_fn=collate) if planned else fixed_loader(dist.get_rank(), 3)
    trainer(devices=2, callbacks=callbacks, max_steps=3).fit(Recommender(), loaded)
    gc.collect()
    return [*counts.steps, _listening()]


@pytest.mark.parametrize(
    ("planned", "profiled", "groups"),
    [
        (False, False, 4),  # torch's default group, TorchRec's exchanges, those of the collection, the plan's
        (True, False, 4),
        (True, True, 5),  # and the profiler's
    ],
)
def test_every_group_that_a_fit_needs_has_one_socket(planned: bool, profiled: bool, groups: int, tmp_path: Path) -> None:
    folder = str(tmp_path) if profiled else None
    for rank, steps in enumerate(run_distributed(_fit, 2, planned, folder)):
        stores = 1 if rank == 0 else 0
        assert [len(listening) for listening in steps] == [*[groups + stores] * 3, 2 + stores]  # the last after the fit


@pytest.mark.parametrize(("interface", "address"), _interfaces().items())
def test_all_groups_listen_on_the_interface_of_gloo(interface: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    first, second = (set(steps[-2]) for steps in run_distributed(_fit, 2, True, None))
    assert second == {address}
    assert first == {address, "::"}  # torch's store, on rank 0, listens on all
