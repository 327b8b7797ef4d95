"""Checkpoints on file systems of fsspec: the one in the memory of a process, and one that ranks share."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_freescale.checkpoint import remote_files
from lightning_freescale.checkpoint.conversion import newest_other_checkpoint, open_checkpoint, read_checkpoint, write_folder
from lightning_freescale.command_line.main import main
from lightning_freescale.testing import RankFailed, run_distributed
from tests.checkpoint.conftest import Saved
from tests.checkpoint.fits import Fitted, Large, fit
from tests.helpers.overlap_training import assert_same


class Far(DirFileSystem):
    """A file system that all ranks share, with ``far://``, which cannot rename."""

    protocol = "far"
    cachable = False

    def __init__(self, **_: Any) -> None:
        super().__init__(path=os.environ["FAR_ROOT"], fs=LocalFileSystem(auto_mkdir=True))

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("far", Far, clobber=True)
    monkeypatch.setenv("FAR_ROOT", str(tmp_path / "far"))


SHARED = pytest.param("far://saved", 2, marks=pytest.mark.slow)


def _flip(address: str) -> None:
    """Change a byte of the largest file."""
    system, place = url_to_fs(address)
    largest = max(system.find(place), key=system.size)
    content = bytearray(system.cat_file(largest))
    content[len(content) // 2] ^= 1
    system.pipe_file(largest, bytes(content))


def _names(address: str) -> list[str]:
    system, place = url_to_fs(address)
    return sorted(name.rpartition("/")[2] for name in system.ls(place, detail=False))


def _saving(folder: str, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_last=True, **options)


def _save_and_resume(address: str, kinds: list[str]) -> dict[str, tuple[list[str], Fitted, Fitted]]:
    found = {}
    for kind in kinds:
        folder, strategy = f"{address}/{kind}", {"checkpoint": kind}
        fit(Large, strategy=strategy, callbacks=[_saving(folder)], max_steps=5)
        names = _names(folder)
        resumed = fit(Large, strategy=strategy, callbacks=[_saving(folder)], resume="last", max_steps=6)
        dist.barrier()
        if dist.get_rank() == 0:
            _flip(f"{folder}/last.ckpt")
        dist.barrier()
        again = fit(Large, strategy=strategy, callbacks=[_saving(f"{folder}")], resume="last", max_steps=8)
        found[kind] = names, resumed, again
    return found


@pytest.mark.parametrize(("address", "ranks"), [("memory://saved", 1), SHARED])
def test_a_run_resumes_from_the_last_checkpoint_of_another_file_system(address: str, ranks: int) -> None:
    """Check also that older checkpoints are removed, and that a damaged last one gives way to an earlier one."""
    whole = run_distributed(fit, ranks, Large, max_steps=8)[0]
    kinds = ["single", "sharded", "async"]
    found = run_distributed(_save_and_resume, ranks, address, kinds, timeout=120)[0]
    for kind in kinds:
        names, resumed, again = found[kind]
        assert names == ["last.ckpt", "step=4.ckpt"], kind
        assert resumed.losses + again.losses == whole.losses[4:], kind
        assert any("last.ckpt is damaged" in text and "step=6.ckpt" in text for text in again.warned), kind
        assert_same(again.weights, whole.weights)


@pytest.mark.usefixtures("patient")
def test_a_folder_that_the_ranks_do_not_share_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"rank 1: FileNotFoundError: .*memory://.*share.*checkpoint='single'"):
        run_distributed(fit, 2, Large, save="memory://saved/a.ckpt", strategy={"checkpoint": "sharded"}, max_steps=1)


@pytest.mark.parametrize("scheme", ["memory", pytest.param("far", marks=pytest.mark.slow)])
def test_the_command_converts_to_and_from_another_file_system(
    scheme: str, saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check also that saves leave one subfolder, and that neither kind replaces the other."""
    folder, single = f"{scheme}://converted/folder.ckpt", f"{scheme}://converted/single.ckpt"
    source = (saved.folder / "sharded4.ckpt").as_uri()
    for _ in range(2):
        main(["consolidate", source, folder, "--to", "sharded", "--force"])
    subfolder, manifest = _names(folder)
    assert re.fullmatch("[0-9a-f]{16}", subfolder) and manifest == "freescale.json"
    main(["consolidate", folder, single, "--to", "single"])
    main(["consolidate", folder, str(tmp_path / "weights.pt")])
    expected = torch.load(saved.folder / "single4.ckpt", weights_only=True)["state_dict"]
    assert_same(read_checkpoint(single)["state_dict"], expected)
    assert_same(torch.load(tmp_path / "weights.pt", weights_only=True), expected)
    for path in (folder, single):
        with open_checkpoint(path) as file:
            assert_same(dict(Large.load_from_checkpoint(file).state_dict()), expected)
    main(["changes", folder, str(saved.folder / "single5.ckpt"), f"{scheme}://converted/changes.pt"])
    assert "rows" in capsys.readouterr().out
    for target, kind, there in ((folder, "single", "folder"), (single, "sharded", "file")):
        with pytest.raises(SystemExit):
            main(["consolidate", source, target, "--to", kind, "--force"])
        assert f"there is a {there} at {target}" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match=r"converted/none\.ckpt"):
        read_checkpoint(f"{scheme}://converted/none.ckpt")


def _fails(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_an_error_after_the_manifest_leaves_the_new_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check an interrupt, and an earlier save that cannot be removed, for example because another job removes it."""
    address, publish = "far://a.ckpt", remote_files.publish
    write_folder({"state_dict": {}, "step": 0}, address)

    def interrupted(*arguments: Any) -> None:
        publish(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(remote_files, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_folder({"state_dict": {}, "step": 1}, address)
    assert read_checkpoint(address)["step"] == 1 and len(_names(address)) == 2
    with monkeypatch.context() as patched:
        patched.setattr(Far, "rm", _fails(FileNotFoundError("removed by another job")))
        write_folder({"state_dict": {}, "step": 2}, address)
    assert read_checkpoint(address)["step"] == 2
    with monkeypatch.context() as patched:
        patched.setattr(Far, "rm", _fails(ArithmeticError("an error of a file system, which is no OSError")))
        patched.setattr(remote_files, "publish", _fails(ValueError("the cause")))
        with pytest.raises(RuntimeError, match="the cause"):
            write_folder({"state_dict": {}, "step": 3}, address)
    assert read_checkpoint(address)["step"] == 2


def test_a_failure_of_this_machine_or_the_file_system_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "far://a.ckpt"
    write_folder({"state_dict": {}}, address)
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(tmp_path / "none"))
        with pytest.raises(RuntimeError, match=rf"{address} could not be written: rank 0: FileNotFoundError.*none"):
            write_folder({"state_dict": {}}, address)
        with pytest.raises(OSError, match=rf"{address} could not be read: rank 0: OSError: .*TMPDIR"):
            read_checkpoint(address)
    monkeypatch.setattr(Far, "get_file", _fails(ArithmeticError("no credentials")))
    with pytest.raises(OSError, match=rf"{address} could not be read: rank 0: ArithmeticError: no credentials"):
        read_checkpoint(address)


def test_paths_with_the_scheme_of_local_files_are_local(tmp_path: Path) -> None:
    assert remote_files.located(f"file://{tmp_path}/a.ckpt") == tmp_path / "a.ckpt"
    assert remote_files.located("a=1.ckpt") == Path("a=1.ckpt")
    assert remote_files.located("memory://a.ckpt") == "memory://a.ckpt"


def test_a_local_path_in_a_text_is_read_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder({"state_dict": {}, "step": 1}, tmp_path / "last.ckpt")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert read_checkpoint(str(tmp_path / "last.ckpt"))["step"] == 1


def _newest_other(address: str) -> str | None:
    if dist.get_rank() == 0:
        for name in ("last", "other"):
            write_folder({"state_dict": {}}, f"{address}/{name}.ckpt")
    else:
        Far.ls = _fails(PermissionError("this rank may not list"))
    dist.barrier()
    found = newest_other_checkpoint(f"{address}/last.ckpt")
    return found and found.path


@pytest.mark.slow
def test_rank_0_alone_lists_the_other_checkpoints() -> None:
    assert run_distributed(_newest_other, 2, "far://saved") == ["far://saved/other.ckpt"] * 2
