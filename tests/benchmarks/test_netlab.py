"""Ranks on fake hosts: they reach each other at the rate of their links, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import netlab
import pytest

LAB = [sys.executable, netlab.__file__]
_WHY_NOT = netlab.available()
needs_namespaces = pytest.mark.skipif(_WHY_NOT is not None, reason=f"netlab: {_WHY_NOT}")

SEND = r"""
import os, socket, time
rank, size = int(os.environ["RANK"]), 4_000_000
if rank == 0:
    with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as server:
        other, address = server.accept()
        start, left = time.perf_counter(), size
        while left:
            left -= len(other.recv(left))
        other.sendall(b"!")
    text = f"seconds {time.perf_counter() - start} from {address[0]} world {os.environ['WORLD_SIZE']}"
else:
    while True:
        try:
            link = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    link.sendall(bytes(size))
    assert link.recv(1) == b"!"
    text = " ".join(["host", *(os.environ[name] for name in ("NETLAB_HOST", "LOCAL_RANK", "GLOO_SOCKET_IFNAME"))])
os.write(1, text.encode() + b"\n")  # at once: the ranks share the pipe
"""
REDUCE = r"""
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
os.write(1, f"sum {total.item()}\n".encode())  # at once: the ranks share the pipe
"""
FAIL = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"


def _lab(*flags: str, code: str) -> subprocess.CompletedProcess:
    line = [*LAB, *flags, "--", sys.executable, "-c", code]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


@needs_namespaces
def test_two_hosts_send_over_a_slow_link() -> None:
    done = _lab("--rate", "20mbit", code=SEND)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[words.index("from") + 1] == "10.77.0.2" and words[words.index("world") + 1] == "2"
    assert float(words[words.index("seconds") + 1]) > 1.0, "4 MB at 20 Mbit/s take 1.6 s at least, less the burst"
    assert "host 1 0 eth0" in done.stdout


@needs_namespaces
@pytest.mark.parametrize("flags", [[], ["--rate", "none"]])
def test_ranks_know_what_they_run_on(flags: list[str]) -> None:
    tell = "import os; os.write(1, os.environ['NETLAB_COMMAND'].encode() + b'\\n')"
    for between in (["--"], []):
        line = [*LAB, "--hosts", "1", *flags, *between, sys.executable, "-c", tell]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == " ".join(["python benchmarks/netlab.py --hosts 1", *flags, "--"]), done.stderr


@pytest.mark.slow
@needs_namespaces
def test_ranks_of_gloo_find_each_other() -> None:
    done = _lab("--hosts", "2", "--rate", "none", "--ranks-per-host", "2", code=REDUCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["sum 10.0"] * 4


@needs_namespaces
@pytest.mark.parametrize(
    ("code", "flags", "expected"),
    [
        (FAIL, [], 7),
        ("import os, signal, time; os.kill(os.getpid(), signal.SIGKILL)", [], 137),
        ("import time; time.sleep(60)", ["--timeout", "1"], netlab.TIMED_OUT),
        ("pass", ["--rate", "nonsense"], 1),
    ],
)
def test_the_exit_code_comes_back_at_once(code: str, flags: list[str], expected: int) -> None:
    done = _lab("--rate", "none", *flags, code=code)
    assert done.returncode == expected, done.stderr


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(how: signal.Signals, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    code = f"import time\nwhile True: open({str(alive)!r}, 'w').close(); time.sleep(0.05)"
    line = [*LAB, "--rate", "none", "--", sys.executable, "-c", code]
    with subprocess.Popen(line) as lab:
        _until(alive.exists)
        os.kill(lab.pid, how)
        assert lab.wait(30) == (128 + how if how == signal.SIGTERM else -how)
    time.sleep(0.5)
    alive.unlink()
    time.sleep(1)
    assert not alive.exists()


@pytest.mark.parametrize(
    ("flags", "message"), [([], "say what to run after --"), (["--hosts", "0", "--", "true"], "--hosts 0")]
)
def test_bad_flags_are_refused(flags: list[str], message: str) -> None:
    done = subprocess.run([*LAB, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and message in done.stderr


def test_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["netlab.py", "--check"])
    assert "unshare, ip, tc not found" in str(netlab.available())
    assert netlab.main() == netlab.UNAVAILABLE
    assert "unavailable" in capsys.readouterr().err


def _until(condition: object) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
