"""Runs ranks on several emulated hosts of this machine with shaped links: a slow network without a cluster.

``python benchmarks/netlab.py --hosts 4 --rate 200mbit -- python script.py``. ``--check`` tests whether this machine supports it
(exit code 0 or 3). Each host is a network namespace with ``eth0`` at 10.77.0.1, .2, ... behind a bridge. Its card is full
duplex and shaped in both directions, so many senders to one receiver take time, too.

The ranks have these variables in their environment: ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``,
``GROUP_RANK``, ``TORCHELASTIC_RUN_ID``, ``MASTER_ADDR``, ``MASTER_PORT``, ``GLOO_SOCKET_IFNAME``, ``NETLAB_HOST``,
``NETLAB_RATE`` and ``NETLAB_COMMAND``, the words of this command. Lightning therefore treats the processes as ranks of torchrun
and each host as a node.

All processes and links are in new network, mount and process namespaces (and in a user namespace, without root). When this
command ends, the kernel removes them. The exit code is that of the first rank that fails, which ends the others; 124 after
``--timeout``; 3 if the machine does not support it. It requires ``ip`` and ``tc`` (iproute2) and ``unshare`` (util-linux).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

TIMED_OUT, UNAVAILABLE = 124, 3
_INSIDE = "NETLAB_INSIDE"
_PR_SET_PDEATHSIG = 1
_MTU = "9000"
_PROBE = (
    "mount -t tmpfs none /run && ip link add name nl0 type veth peer name nl1 && ip link add name nlb type bridge && "
    "tc qdisc add dev nl0 root tbf rate 10mbit burst 32kb limit 1mb && ip netns add probe"
)


def main() -> int:
    """Return the exit code of the command line."""
    options = _options()
    if _INSIDE not in os.environ:
        reason = available()
        if options.check or reason is not None:
            print(
                "netlab: ok" if reason is None else f"netlab: unavailable: {reason}", file=sys.stderr if reason else sys.stdout
            )
            return 0 if reason is None else UNAVAILABLE
        return _enter()
    del os.environ[_INSIDE]
    _build(options)
    return _wait(_start(options), options.timeout)


def link_rate(unshaped: float | None = None) -> float:
    """Return the rate of a link in bytes per second and direction, in a rank of this command.

    Without a rate, and outside of netlab, return ``unshaped``, or end the program if it is None.
    """
    text = os.environ.get("NETLAB_RATE", "none")
    if text == "none" and unshaped is not None:
        return unshaped
    found = re.fullmatch(r"([\d.]+)([mg])bit", text)
    if found is None:
        sys.exit(f"NETLAB_RATE={text!r}: run this under benchmarks/netlab.py with a --rate in mbit or gbit")
    return float(found[1]) * {"m": 1e6, "g": 1e9}[found[2]] / 8


def available() -> str | None:
    """Return the reason why this machine does not support netlab; None if it does."""
    missing = [tool for tool in ("unshare", "ip", "tc") if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    done = subprocess.run([*_unshare(), "sh", "-c", _PROBE], capture_output=True, text=True)
    return None if done.returncode == 0 else f"the kernel refuses: {done.stderr.strip() or done.returncode}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--check", action="store_true", help="only test whether this machine supports netlab")
    add("--hosts", type=int, default=2)
    add("--ranks-per-host", type=int, default=1)
    add("--rate", default="200mbit", help="rate of each card in each direction in the notation of tc, or 'none'")
    add("--burst", default="64kb", help="burst of tc's tbf")
    add("--queue", default="16mb", help="queue of tc's tbf, deep enough to drop nothing")
    add("--congestion", default="reno", help="TCP's congestion control; '' for the kernel's, which a namespace may refuse")
    add("--port", type=int, default=29511, help="MASTER_PORT")
    add("--timeout", type=float, default=300, help="seconds")
    add("--pin", action="store_true", help="pin rank r to core r, modulo cores")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    options = parser.parse_args()
    options.command = options.command[options.command[:1] == ["--"] :]
    if not (options.check or options.command):
        parser.error("say what to run after --, e.g. -- python script.py")
    if not (1 <= options.hosts <= 254 and options.ranks_per_host >= 1):
        parser.error(f"--hosts {options.hosts} --ranks-per-host {options.ranks_per_host}: 1 to 254, and at least 1")
    return options


def _unshare() -> list[str]:
    rootless = ["--user", "--map-root-user"] if os.geteuid() else []
    return ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", *rootless]


def _enter() -> int:
    """Run this file again in new namespaces, which end with this process."""
    die_with_parent = ctypes.CDLL(None).prctl
    inside = subprocess.Popen(
        [*_unshare(), sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]],
        env={**os.environ, _INSIDE: "1"},
        preexec_fn=lambda: die_with_parent(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )

    def stop(number: int, _: object) -> NoReturn:
        inside.kill()  # unshare itself ignores the gentler signals
        sys.exit(128 + number)

    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, stop)
    return inside.wait()


def _build(options: argparse.Namespace) -> None:
    """Create a bridge, and each host with its card behind it."""
    _do("mount -t tmpfs none /run")
    _do("ip link set lo up")
    _do("ip link add name br0 type bridge")
    _do(f"ip link set br0 mtu {_MTU} up")
    for host in range(options.hosts):
        name, port = f"h{host}", f"p{host}"
        _do(f"ip netns add {name}")
        _do(f"ip link add name {port} mtu {_MTU} type veth peer name eth0 mtu {_MTU} netns {name}")
        _do(f"ip link set {port} master br0 up")
        _do(f"ip -n {name} addr add 10.77.0.{host + 1}/24 dev eth0")
        _do(f"ip -n {name} link set lo up")
        _do(f"ip -n {name} link set eth0 up")
        if options.rate != "none":
            shape = f"root tbf rate {options.rate} burst {options.burst} limit {options.queue}"
            _do(f"ip netns exec {name} tc qdisc add dev eth0 {shape}")  # bytes that the host sends
            _do(f"tc qdisc add dev {port} {shape}")  # bytes that it receives
        if options.congestion:
            setting = f"echo {options.congestion} > /proc/sys/net/ipv4/tcp_congestion_control"
            _do(f"ip netns exec {name} sh -c", setting)


def _do(command: str, *last: str) -> None:
    done = subprocess.run([*command.split(), *last], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"netlab: {' '.join([command, *last])!r} failed: {(done.stderr or done.stdout).strip()}")


def _start(options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    world, cores = options.hosts * options.ranks_per_host, sorted(os.sched_getaffinity(0))
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(options.port)}
    shared |= {"GLOO_SOCKET_IFNAME": "eth0", "NETLAB_RATE": options.rate, "TORCHELASTIC_RUN_ID": "netlab"}
    shared["NETLAB_COMMAND"] = _own_words(options.command)  # a result names its machine
    ranks = []
    for rank in range(world):
        host, local = divmod(rank, options.ranks_per_host)
        own = {"RANK": str(rank), "LOCAL_RANK": str(local), "NETLAB_HOST": str(host), "GROUP_RANK": str(host)}
        own["LOCAL_WORLD_SIZE"] = str(options.ranks_per_host)
        pinned = ["taskset", "-c", str(cores[rank % len(cores)])] if options.pin else []
        command = ["ip", "netns", "exec", f"h{host}", *pinned, *options.command]
        ranks.append(subprocess.Popen(command, env={**os.environ, **shared, **own}))
    return ranks


def _own_words(command: Sequence[str]) -> str:
    """Return the words before the command of the ranks, as written in the repository."""
    flags = sys.argv[1 : len(sys.argv) - len(command)]
    return " ".join(["python", "benchmarks/netlab.py", *(flags[:-1] if flags[-1:] == ["--"] else flags), "--"])


def _wait(ranks: Sequence[subprocess.Popen[bytes]], timeout: float) -> int:
    """Return the exit code of the first rank that fails; the others end with this process, the first of its namespace."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        if failed:  # the others would wait for it
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(0.05)
    return TIMED_OUT


if __name__ == "__main__":
    sys.exit(main())
