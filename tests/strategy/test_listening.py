"""Where a run listens: one socket a process group, on the interface of the group."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import struct
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
    """The addresses at which this process listens over TCP."""
    ends = [link for name in os.listdir("/proc/self/fd") if (link := _target(f"/proc/self/fd/{name}")).startswith("socket:")]
    rows = [row.split() for family in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]]
    return [_address(row[1].split(":")[0]) for row in rows if row[3] == _LISTENS and f"socket:[{row[9]}]" in ends]


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _address(text: str) -> str:
    words = [struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        found = fcntl.ioctl(end.fileno(), 0x8915, struct.pack("256s", interface.encode()))  # SIOCGIFADDR
    return socket.inet_ntoa(found[20:24])


def _interfaces() -> list[str]:
    found = []
    for _, name in socket.if_nameindex():
        try:
            _address_of(name)
        except OSError:  # it has none
            continue
        found.append(name)
    return found


class _Counts(L.Callback):
    """Keeps where the rank listens at the end of each step."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(_listening())


def _fit(planned: bool, strategy: str, folder: str | None) -> list[list[str]]:
    counts = _Counts()
    callbacks = [counts, *([] if folder is None else [BubbleProfiler(folder, verbose=False)])]
    data = Samples(16)
    loaded = FreeScaleDataModule(data, data.lengths, 2, collate_fn=collate) if planned else fixed_loader(dist.get_rank(), 3)
    trainer(devices=2, strategy=strategy, callbacks=callbacks, max_steps=3).fit(Recommender(), loaded)
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
    for rank, steps in enumerate(run_distributed(_fit, 2, planned, "freescale", folder)):
        stores = 1 if rank == 0 else 0
        assert [len(listening) for listening in steps] == [*[groups + stores] * 3, 2 + stores]  # the last after the fit


@pytest.mark.parametrize("interface", _interfaces())
def test_all_groups_listen_on_the_interface_that_gloo_is_told(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    first, second = (set(steps[-2]) for steps in run_distributed(_fit, 2, True, "freescale", None))
    assert second == {_address_of(interface)}
    assert first == {_address_of(interface), "::"}  # torch's store, on rank 0, listens on all
