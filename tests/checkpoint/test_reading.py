"""Damaged and unsuitable checkpoints: errors name them, and nothing is loaded."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale.checkpoint.conversion import opened, read
from lightning_freescale.checkpoint.held_files import VERSION, HeldFiles
from lightning_freescale.testing import RankFailed, run_distributed
from tests.checkpoint.conftest import Saved
from tests.checkpoint.fits import EPOCHS, STEPS, TABLE, Large, Seen, fit
from tests.helpers.recommender import Recommender, Samples, collate, trainer


def _flip(path: Path) -> None:
    if path.is_dir():
        (path,) = path.glob("__1_*.distcp")
        start = path.stat().st_size // 2
    else:
        table = torch.load(path, weights_only=True)["state_dict"][TABLE]
        start = path.read_bytes().index(table.numpy().tobytes()) + 100
    content = bytearray(path.read_bytes())
    content[start] ^= 1
    path.write_bytes(content)


def _flip_at(mark: bytes, offset: int, mask: int, file: str = "") -> Callable[[Path], None]:
    """Return a function that changes the byte at a distance from the first ``mark``, or from the last one if it is negative."""

    def flip(path: Path) -> None:
        content = bytearray((path / file).read_bytes())
        start = content.index(mark) + offset if offset >= 0 else content.rindex(mark) - offset
        content[start] ^= mask
        (path / file).write_bytes(content)

    return flip


LOCAL, CENTRAL, END64, LOCATOR, END = (b"PK" + part for part in (b"\3\4", b"\1\2", b"\6\6", b"\6\7", b"\5\6"))
"""The headers of a record, of an entry in the directory, and of the parts of the directory's end."""


def _cut(path: Path) -> None:
    if path.is_dir():
        (path,) = path.glob("__1_*.distcp")
    path.write_bytes(path.read_bytes()[:-2000])


def _lose(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _copy_in_part(path: Path) -> None:
    """Leave the files of DCP, as a copy that has not ended does."""
    for name in ("freescale.json", "meta.pt"):
        (path / name).unlink()


def _link_to_itself(name: str) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(name)

    return replace


def _of_another_version(path: Path) -> None:
    content = json.loads((path / "freescale.json").read_text())
    (path / "freescale.json").write_text(json.dumps({**content, "format": 99, "lightning_freescale": "7.0"}))


def _write_manifest(*change: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        text = (path / "freescale.json").read_text()
        (path / "freescale.json").write_text(text.replace(*change) if len(change) == 2 else change[0])

    return write


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "flipped table": ("sharded", _flip, r"rank \d: [^;]*__1_0.distcp"),
    "cut table": ("sharded", _cut, r"rank \d: [^;]*__1_0.distcp.* \d+ bytes"),
    "lost table": ("sharded", _lose("__0_0.distcp"), r"rank \d: [^;]*__0_0.distcp"),
    "loop of links": ("sharded", _link_to_itself("__0_0.distcp"), r"could not be read: rank 0: OSError: \[Errno 40\]"),
    "lost manifest": ("sharded", _lose("freescale.json"), "rank 0: [^;]*freescale.json"),
    "copied in part": ("sharded", _copy_in_part, "damaged or incomplete.*rank 0: [^;]*freescale.json"),
    "another version": ("sharded", _of_another_version, "rank 0: [^;]*99.*7.0"),
    "edited manifest": ("sharded", _write_manifest('"float32"', '"float64"'), "rank 0: [^;]*freescale.json"),
    "no manifest": ("sharded", _write_manifest("{}"), "rank 0: [^;]*freescale.json"),
    "manifest of another kind": ("sharded", _write_manifest("[]"), "rank 0: [^;]*freescale.json"),
    "flipped pieces": ("sharded", _flip_at(b"MetadataIndex", 3, 1, ".metadata"), r"damaged.*rank \d: [^;]*.metadata"),
    "flipped entries": ("sharded", _flip_at(b"data.pkl", 90, 1, "meta.pt"), r"damaged.*rank \d: [^;]*meta.pt"),
    "undecodable manifest": ("sharded", _flip_at(b"files", 1, 128, "freescale.json"), "damaged.*rank 0: [^;]*freescale.json"),
    "flipped file": ("single", _flip, r"rank \d: .*CRC-32"),
    "first byte": ("single", _flip_at(LOCAL, 0, 1), r"damaged.*rank \d"),
    "name in a record": ("single", _flip_at(LOCAL, 35, 1), r"damaged.*rank \d"),
    "length of a name in a record": ("single", _flip_at(LOCAL, 26, 1), r"damaged.*rank \d"),
    "flipped pickle": ("single", _flip_at(b"state_dict", 2, 1), r"damaged.*rank \d: .*CRC-32"),
    "encrypted": ("single", _flip_at(CENTRAL, 8, 1), r"damaged.*rank \d"),
    "undecodable name": ("single", _flip_at(CENTRAL, 46, 128), r"damaged.*rank \d"),
    "compressed by deflate": ("single", _flip_at(CENTRAL, 10, 8), r"damaged.*rank \d"),
    "compressed by bzip2": ("single", _flip_at(CENTRAL, -10, 12), r"damaged.*rank \d"),
    "compressed by lzma": ("single", _flip_at(CENTRAL, -10, 14), r"damaged.*rank \d"),
    "compressed in a new way": ("single", _flip_at(CENTRAL, -10, 99), r"damaged.*rank \d"),
    "another checksum": ("single", _flip_at(CENTRAL, 16, 4), r"damaged.*rank \d: .*CRC-32"),
    "a large record": ("single", _flip_at(CENTRAL, 27, 64), r"damaged.*rank \d"),
    "another offset": ("single", _flip_at(CENTRAL, 42, 64), r"damaged.*rank \d"),
    "several disks": ("single", _flip_at(LOCATOR, 4, 1), "damaged.*rank 0"),
    "end of the directory": ("single", _flip_at(END, 1, 1), "damaged.*rank 0"),
    "a folder": ("single", _flip_at(CENTRAL, 38, 16), "damaged.*rank 0"),
    "number of records": ("single", _flip_at(END64, 24, 8), "damaged.*rank 0"),
    "size of the directory": ("single", _flip_at(END64, 40, 1), "damaged.*rank 0"),
    "cut file": ("single", _cut, "rank 0: .*torch.save"),
    "empty file": ("single", lambda path: path.write_bytes(b""), "rank 0: [^;]*empty"),
    "text": ("single", lambda path: path.write_text("no checkpoint " * 100), "rank 0: [^;]*torch.save"),
    "no weights": ("single", lambda path: torch.save({"epoch": torch.ones(1), "step": 3}, path), "no state dict.* epoch, step"),
    "no state_dict": ("single", lambda path: torch.save({VERSION: "2.6.6", "epoch": 1}, path), "has no state_dict"),
    "list": ("single", lambda path: torch.save([1, 2], path), "list"),
    "own class": ("single", lambda path: torch.save({"state_dict": {}, "data": Samples(2)}, path), "weights_only"),
    "nothing": ("single", Path.unlink, ""),
}
"""The kind of the checkpoint, the damage, and a pattern of the error."""
OTHER_ERRORS = {"nothing": "FileNotFoundError", "loop of links": "OSError"}
"""The types of errors that do not make ``ckpt_path="last"`` use an earlier checkpoint."""


def _errors(paths: list[Path], together: bool) -> dict[str, str]:
    found = {}
    for path in paths:
        try:
            found[path.name] = read(opened(path, together=together), True) and "nothing"
        except (ValueError, OSError) as error:
            found[path.name] = f"{type(error).__name__}: {error}"
    return found


def _errors_with_little(paths: list[Path], intact: Path) -> tuple[dict[str, str], str, str]:
    """Return the errors, and those of an intact folder if rank 0 can open two more files, and if it has no more memory."""
    found, limits = _errors(paths, True), [_few_files(2), _no_memory()]
    few, poor = (limit if torch.distributed.get_rank() == 0 else nullcontext() for limit in limits)
    with few:
        of_files = _errors([intact], True)[intact.name]
    with poor:
        return found, of_files, _errors([intact], True)[intact.name]


@contextmanager
def _no_memory() -> Iterator[None]:
    """Let this process allocate no more blocks of a megabyte."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
    held = []
    try:
        with suppress(MemoryError):
            while True:  # until no freed memory is left
                held.append(bytearray(1 << 20))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextmanager
def _few_files(more: int) -> Iterator[None]:
    """Let this process open only a number of more files."""
    os.close(lowest := os.dup(0))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_check_that_cannot_open_a_file_finds_no_damage(saved: Saved) -> None:
    folder, single = (opened(saved.folder / f"{kind}4.ckpt", together=False) for kind in ("sharded", "single"))
    cases = [(0, folder), (0, single), (1, single)]
    for more, checkpoint in cases:
        with _few_files(more), pytest.raises(OSError, match=r"\[Errno 24\]"):
            checkpoint.damage(0, 1)
    with _few_files(2), pytest.raises(OSError, match=r"\[Errno 24\]"):
        HeldFiles(folder.path)  # it cannot read the manifest


def test_what_is_damaged_or_no_checkpoint_is_refused(saved: Saved, tmp_path: Path) -> None:
    """Check two ranks that share the work, and one process."""
    for name, (kind, damage, _) in DAMAGE.items():
        source = saved.folder / f"{kind}4.ckpt"
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
        damage(tmp_path / name)
    paths = [tmp_path / name for name in DAMAGE]
    (first, few, poor), second = run_distributed(_errors_with_little, 2, paths, saved.folder / "sharded4.ckpt")
    assert (first, few, poor) == second
    assert re.search(r"^OSError: .*sharded4.ckpt could not be read: rank 0: MemoryError", poor), poor
    assert re.search(r"^OSError: .*sharded4.ckpt could not be read: rank 0: OSError: \[Errno 24\].*ulimit -n", few), few
    assert "rank 1" not in few, "an intact rank has no reason"
    for errors in (first, _errors(paths, False)):
        expected = {
            name: f"^{OTHER_ERRORS.get(name, 'ValueError')}: .*{name}.*{pattern}" for name, (*_, pattern) in DAMAGE.items()
        }
        assert {name: errors[name] for name, pattern in expected.items() if not re.search(f"(?s){pattern}", errors[name])} == {}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_a_damaged_checkpoint_ends_the_fit_on_every_rank(kind: str, saved: Saved, tmp_path: Path) -> None:
    source, path = saved.folder / f"{kind}4.ckpt", tmp_path / "a.ckpt"
    (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
    _flip(path)
    with pytest.raises(RankFailed, match=rf"(?s)rank 0: .*ValueError: [^\n]*{path}.*rank 1: .*ValueError: [^\n]*{path}"):
        run_distributed(fit, 2, Large, resume=path)


class Larger(Large):
    def __init__(self) -> None:
        super().__init__()
        self.added = self.net.hidden[2]
        self.net.hidden = self.net.hidden[:1]


class OtherOptimizer(Large):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer


WIDE = {"embedding_dim": 16}
ANOTHER: dict[str, tuple[str, Callable[[], Any], str]] = {
    "dense parameters": ("single", Larger, r"Missing key\(s\).*added.weight.*Unexpected key\(s\).*net.hidden.2.weight"),
    "tables": (
        "sharded",
        partial(Large, item={"name": "other"}, cat={"num_embeddings": 18}),
        r"missing keys \S+other.weight; unexpected keys \S+item.weight; keys of another shape \S+cat.weight of \(13, 8\) "
        r"instead of \(18, 8\)",
    ),
    "shapes of tables": (
        "single",
        partial(Large, 20_000, WIDE, WIDE),  # with as many values in the first table
        r"item.weight of \(40000, 8\) instead of \(20000, 16\)",
    ),
    "states": (
        "single",
        partial(OtherOptimizer, "adam"),
        r"missing keys \S+item.weight exp_avg, .* 1 more; unexpected keys .* sum, ",
    ),
    "shapes of states": (
        "sharded",
        partial(OtherOptimizer, "adagrad"),
        r"item.weight sum of \(40000, 1\) instead of \(40000, 8\)",
    ),
    "options": (
        "sharded",
        partial(OtherOptimizer, "sgd"),
        r"another optimizer than SGD: .*lr_decay.*but not momentum, dampening",
    ),
}
"""The kind of the checkpoint, the model that resumes, and a pattern of its error."""


def _refused(folder: Path) -> dict[str, str]:
    found = {}
    for name, (kind, make, _) in ANOTHER.items():
        with pytest.raises((RuntimeError, ValueError)) as refused:
            fit(make, resume=folder / f"{kind}4.ckpt")
        found[name] = str(refused.value)
    return found


def test_another_model_or_optimizer_is_refused_by_its_keys(saved: Saved) -> None:
    first, second = run_distributed(_refused, 2, saved.folder)
    for name, error in first.items():
        pattern = ANOTHER[name][-1]
        assert re.search(f"(?s){pattern}", error) and re.search(f"(?s){pattern}", second[name]), (name, error, second[name])


def _another_loop(folder: Path) -> list[list[str]]:
    """Return the warnings for checkpoints of this and another strategy's run with a loader."""
    path = folder / "loader.ckpt"
    loader_alone = {"strategy": "ddp", "max_epochs": 1}
    fit(Seen, save=path, **loader_alone)
    if int(os.environ["RANK"]) == 0:
        content = torch.load(path, weights_only=False)
        del content["FreeScaleDataModule"]
        torch.save(content, path)
    torch.distributed.barrier()
    fit(Seen, save=folder / "ours.ckpt", max_epochs=1)
    return [fit(Seen, resume=each).warned for each in (path, folder / "ours.ckpt")]


def test_a_checkpoint_of_another_loop_is_told_what_starts_anew(tmp_path: Path) -> None:
    other, ours = run_distributed(_another_loop, 2, tmp_path)[0]
    for name in ("FreeScaleDataModule", "'freescale'"):
        assert any(name in each and "checkpoint" in each for each in other), name
        assert not any(name in each and "checkpoint" in each for each in ours), name


class Malicious:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return Path.touch, (self.made,)


@pytest.mark.parametrize("file", [".metadata", "meta.pt"])
def test_code_in_a_folder_is_not_run(file: str, saved: Saved, tmp_path: Path) -> None:
    path, made = tmp_path / "a.ckpt", tmp_path / "made"
    shutil.copytree(saved.folder / "sharded4.ckpt", path)
    if file == "meta.pt":
        torch.save({"state_dict": Malicious(made)}, path / file)
    else:
        (path / file).write_bytes(pickle.dumps(Malicious(made)))
    manifest, content = json.loads((path / "freescale.json").read_text()), (path / file).read_bytes()
    manifest["files"][file] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    del manifest["crc32"]
    manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    (path / "freescale.json").write_text(json.dumps(manifest))
    checkpoint = opened(path, together=False)
    with pytest.raises(ValueError, match="weights_only"):
        read(checkpoint, True)
    assert not made.exists()


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_a_damaged_last_one_gives_way_to_the_newest_whole_one(kind: str, saved: Saved, tmp_path: Path) -> None:
    """Check that the run resumes after 4 of 12 steps."""
    for age, (name, step) in enumerate({"last": 5, "torn": 5, "newer": 4, ".hidden": 5, "older": 5}.items()):
        source, path = saved.folder / f"{kind}{step}.ckpt", tmp_path / f"{name}.ckpt"
        (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
        if name in ("last", "torn"):
            of_folder, of_file = (_copy_in_part, _flip) if name == "torn" else (_flip, _flip_at(CENTRAL, 8, 1))
            (of_folder if path.is_dir() else of_file)(path)
        os.utime(path, (1e9 - age, 1e9 - age))
    saving = ModelCheckpoint(tmp_path, save_last=True)
    found = run_distributed(fit, 2, Large, callbacks=[saving], resume="last")[0]
    assert len(found.losses) == STEPS * EPOCHS - 4
    assert any("last.ckpt" in each and "newer.ckpt" in each for each in found.warned)


# -- contents


OURS = {"updates", "table_updates", "in_backward_states", "id_maps", "random_states", "bucket_order", "bag_states"}


class WithHyperparameters(Recommender):
    def __init__(self, **hyperparameters: Any) -> None:
        super().__init__("rowwise_adagrad")
        self.save_hyperparameters(hyperparameters)


def _fit_with_callbacks(folder: Path) -> None:
    data = Samples(16)
    loader = FreeScaleDataModule(data, data.lengths, 2, collate_fn=collate)
    saving = ModelCheckpoint(folder, monitor="loss", filename="best", save_last=True)
    callbacks = [saving, BubbleProfiler(folder / "bubbles", verbose=False)]
    module = WithHyperparameters(lr=0.1, layers=[8, 8], name="net", nested={"bias": False, "none": None})
    trainer(devices=2, callbacks=callbacks, enable_checkpointing=True).fit(module, loader)


@pytest.mark.slow
def test_a_checkpoint_with_callbacks_and_hyperparameters_is_read_with_weights_only(tmp_path: Path) -> None:
    run_distributed(_fit_with_callbacks, 2, tmp_path)
    for file in ("best.ckpt", "last.ckpt"):
        found = torch.load(tmp_path / file, weights_only=True)
        assert found["freescale"].keys() <= OURS and len(found["freescale"]["random_states"]) == 2
        assert "FreeScaleDataModule" in found and "state_dict" in found and found["hyper_parameters"]["lr"] == 0.1
