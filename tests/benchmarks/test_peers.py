"""Others' partitioners are fetched, stay outside the project, and are loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fetch_peers
import peers
import pytest


def test_every_sample_is_in_one_part_of_a_peer() -> None:
    assert peers.rank_of_sample([[2, 0], [1]], 3).tolist() == [0, 1, 0]
    for parts in ([[0], [1]], [[0, 1], [1, 2]], [[0, 1], [2, 3]]):
        with pytest.raises(ValueError, match="no partition of 3 samples"):
            peers.rank_of_sample(parts, 3)


VERL = """from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

def get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size):
    return [list(range(part, len(seqlen_list), k_partitions)) for part in range(k_partitions)]
"""
NVIDIA = """from torch.cuda import nvtx

def karmarkar_karp(workloads, k_partitions, equal_size):
    if nvtx is not None:
        nvtx.range_push("karmarkar_karp")
    return [workloads[part::k_partitions] for part in range(k_partitions)]
"""


class _Sampler:
    """Signature and result of transformers' BatchRebalanceSampler."""

    def __init__(self, lengths: list[int], effective_batch_size: int, dp_size: int, grad_accum: int) -> None:
        self.ranks = dp_size
        assert effective_batch_size == len(lengths) and grad_accum == 1

    def _assign(self, indices: range, lengths: list[int]) -> list[list[list[int]]]:
        return [[list(indices[rank :: self.ranks])] for rank in range(self.ranks)]


def _repository(path: Path) -> str:
    """With stand-ins for the files of both; returns its commit."""
    files = {name: "" for source in fetch_peers.SOURCES.values() for name in source.files}
    files |= {fetch_peers.SOURCES["verl"].files[0]: VERL, fetch_peers.SOURCES["recsys-examples"].files[0]: NVIDIA}
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    git = ["git", "-C", str(path), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
        subprocess.run([*git, *command], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("clone", [True, False])
def test_peers_are_fetched_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clone: bool
) -> None:
    repository, folder = tmp_path / "repository", tmp_path / "peers"
    commit = _repository(repository)
    (repository / "LICENSE").write_text("changed later, but not in the commit")
    url = "https://nowhere.invalid" if clone else f"file://{repository}"
    sources = {name: source._replace(url=url, commit=commit) for name, source in fetch_peers.SOURCES.items()}
    monkeypatch.setattr(fetch_peers, "SOURCES", sources)
    monkeypatch.setattr(fetch_peers, "compile_partitioner", lambda folder: None)
    clones = [f"--from={name}={repository}" for name in sources] if clone else []
    fetch_peers.main([str(folder), "--no-transformers", *clones])
    assert (folder / "verl" / "LICENSE").read_text() == (folder / "recsys-examples" / "LICENSE").read_text() == ""
    monkeypatch.setattr(peers, "_transformers", lambda site: _Sampler)
    loaded = peers.load_peers(folder)
    assert not any(name.split(".")[0] == "verl" for name in sys.modules)
    numbers = list(range(6))  # so that the costs that the stand-in returns are samples
    for peer in loaded.values():
        assert [list(part) for part in peer(numbers, numbers, 2)] == [[0, 2, 4], [1, 3, 5]]
    assert loaded.keys() == {"verl", "nvidia", "hf", "nvidia_free"}
    monkeypatch.setattr(peers, "_transformers", lambda site: None)
    assert peers.load_peers(folder).keys() == {"verl", "nvidia", "nvidia_free"}
    assert "without Hugging Face's" in capsys.readouterr().out


def test_peers_stay_outside_the_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in [
        ([str(Path(fetch_peers.__file__).parent / "published")], "is inside the project"),
        ([str(tmp_path), "--from", "other=/tmp"], "write NAME=PATH with a name of verl, recsys-examples"),
    ]:
        with pytest.raises(SystemExit):
            fetch_peers.main(arguments)
        assert told in capsys.readouterr().err


def test_a_clone_without_the_commit_is_told(tmp_path: Path) -> None:
    _repository(tmp_path / "repository")
    with pytest.raises(SystemExit, match="--from NAME=PATH"):
        fetch_peers.fetch(fetch_peers.SOURCES["verl"], tmp_path / "into", str(tmp_path / "repository"))


def test_missing_peers_are_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"fetch_peers\.py"):
        peers.load_peers(tmp_path)
