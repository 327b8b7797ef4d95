"""What may write files where nothing else may."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_freescale.strategy.file_writes import FileWritesRefused
from lightning_freescale.strategy.preserve_state import LeavesTraceError


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("before")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: Path("new").write_text("x"), "writes to the file 'new'"),
        (lambda: Path("there").open("a").close(), "writes to the file 'there'"),
        (lambda: os.remove("there"), "removes the file 'there'"),
        (lambda: os.rename("there", "new"), "renames the file 'there'"),
        (lambda: os.truncate("there", 0), "truncates the file 'there'"),
    ],
)
def test_refused_before_it_is_done(change: Callable[[], object], told: str) -> None:
    with FileWritesRefused(), pytest.raises(LeavesTraceError, match=told):
        change()
    assert Path("there").read_text() == "before" and not Path("new").exists()
    change()


def test_who_goes_on_has_not_written() -> None:
    with FileWritesRefused(), suppress(Exception):
        Path("new").write_text("x")
    assert not Path("new").exists()


def test_reading_is_free() -> None:
    with FileWritesRefused():
        assert Path("there").read_text() == "before"
        Path(os.devnull).write_text("x")


def test_other_threads_and_caches_of_compiled_code_may_write(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("imported_meanwhile.py").write_text("NUMBER = 3")
    monkeypatch.syspath_prepend(in_folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    thread = threading.Thread(target=Path("new").write_text, args=["x"])
    with FileWritesRefused():
        thread.start()
        thread.join()
        assert importlib.import_module("imported_meanwhile").NUMBER == 3
    assert Path("new").exists() and list(in_folder.rglob("*.pyc"))
