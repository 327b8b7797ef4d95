"""Registration, imports, the command line, and the contents of the wheel."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from contextlib import redirect_stderr, redirect_stdout
from email import message_from_string
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_freescale
from lightning_freescale import FreeScaleStrategy, _torchrec
from lightning_freescale._torchrec import FITTING
from lightning_freescale.data import collate_histories
from lightning_freescale.testing import run_distributed

ROOT = Path(__file__).parents[1]
NEWEST = list(FITTING.values())[-1]


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_registered_once_and_never_over_another() -> None:
    FreeScaleStrategy.register_strategies(StrategyRegistry)  # a second time is no error
    code = "from lightning.pytorch.strategies import StrategyRegistry as R, DDPStrategy; R.register('freescale', DDPStrategy);"
    assert _python(code + "import lightning_freescale; print(type(R.get('freescale')).__name__)") == DDPStrategy.__name__


def test_names() -> None:
    for name in lightning_freescale.__all__:
        assert getattr(lightning_freescale, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lightning_freescale.nothing  # noqa: B018


BLOCK = "import sys; sys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None;"


@pytest.mark.slow
def test_packages_that_do_not_need_torchrec() -> None:
    imports = "import lightning_freescale.balance, lightning_freescale.comm.process_group, lightning_freescale.profiling"
    late = f"{BLOCK} {imports}, lightning_freescale.testing; print('jsonschema' in sys.modules)"
    assert _python(late) == "False", "every run would wait for a package that only reads documents"
    loaded = "import sys, lightning_freescale; print('torchrec' in sys.modules)"
    assert _python(loaded) == "False", "importing the package must not cost TorchRec's import"


@pytest.mark.slow
def test_says_what_is_missing() -> None:
    code = (
        "from lightning_freescale.data import collate_histories\ntry: collate_histories([])\nexcept ImportError as e: print(e)"
    )
    assert "pip install torchrec" in _python(f"{BLOCK}\n{code}")
    code = "from lightning_freescale.embeddings import sharding"
    assert "pip install torchrec" in _python(f"{BLOCK}\ntry:\n    {code}\nexcept ImportError as e: print(e)")


UNINSTALL = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu"
FOR_CPU = "pip install fbgemm-gpu-cpu=="


@pytest.mark.parametrize(
    ("error", "torch", "cuda", "without_driver", "with_driver"),
    [
        (
            OSError("libcuda.so.1"),
            "2.13.0+cpu",
            None,
            [UNINSTALL, f"{FOR_CPU}1.8.0"],
            [f"{UNINSTALL} torch", "pip install torch==2.13.0 fbgemm-gpu==1.8.0 torchrec==1.8.0"],
        ),
        (
            OSError("libcuda.so.1"),
            "2.13.1+cu126",
            "12.6",
            [UNINSTALL, f"{FOR_CPU}1.8.0"],
            [UNINSTALL, "pip install fbgemm-gpu==1.8.0 torchrec==1.8.0"],
        ),
        (
            AttributeError("jagged_2d"),
            "2.14.1+cu130",
            "13.0",
            ["pip install torchrec==1.9.2", UNINSTALL, f"{FOR_CPU}1.9.0"],
            [UNINSTALL, "pip install fbgemm-gpu==1.9.0 torchrec==1.9.2"],
        ),
        (
            ImportError("no torchrec"),
            "2.13.0",
            "12.6",
            ["pip install torchrec==1.8.0", UNINSTALL, f"{FOR_CPU}1.8.0"],
            [UNINSTALL, "pip install fbgemm-gpu==1.8.0 torchrec==1.8.0"],
        ),
        (
            OSError("libcuda.so.1"),
            "2.9.1",
            "12.6",
            ["pip install torch=={0} torchrec=={2}".format(*NEWEST), UNINSTALL, f"{FOR_CPU}{NEWEST[1]}"],
            [f"{UNINSTALL} torch", "pip install torch=={} fbgemm-gpu=={} torchrec=={}".format(*NEWEST)],
        ),
    ],
    ids=["for CUDA", "torch for CUDA", "mismatched", "missing", "another torch"],
)
@pytest.mark.parametrize("driver", [False, True])
def test_a_torchrec_that_does_not_load_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    torch: str,
    cuda: Any,
    without_driver: list[str],
    with_driver: list[str],
    driver: bool,
) -> None:
    """Name the commands for this machine alone. Without a driver, keep a TorchRec that fits; pip adds FBGEMM for CUDA."""

    def fails(name: str) -> None:
        if isinstance(error, OSError):
            raise OSError("fbgemm_gpu_config.so") from error  # whose cause names what is missing
        raise error

    monkeypatch.setattr(_torchrec, "import_module", fails)
    _beside({"torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}, cuda, driver, monkeypatch)
    monkeypatch.setattr(_torchrec.torch, "__version__", torch)
    with pytest.raises(ImportError) as caught:
        _torchrec.require_torchrec()
    text = str(caught.value)
    assert str(error) in text and f"torch {torch}" in text and "fbgemm-gpu 1.8.0" in text
    assert [line.strip() for line in text.splitlines()[1:]] == (with_driver if driver else without_driver)


def _beside(releases: dict[str, str], cuda: str | None, driver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that these releases are installed with a torch built for that CUDA, on a machine with or without a driver."""

    def load(name: str) -> None:
        assert name == "libcuda.so.1"
        if not driver:
            raise OSError(name)

    monkeypatch.setattr(_torchrec, "CDLL", load)
    monkeypatch.setattr(_torchrec, "_release", lambda package: releases.get(package, ""))
    monkeypatch.setattr(_torchrec.torch.version, "cuda", cuda)


def test_an_import_of_torchrec_that_fails_ends_with_the_commands_of_readme_and_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show the same commands in the README, on the page about installation and in the error of a script's own import."""
    _beside({"fbgemm-gpu": "1.9.0", "torchrec": "1.9.2"}, "13.0", False, monkeypatch)
    (tmp_path / "torchrec.py").write_text("raise OSError('fbgemm_gpu_py.so') from OSError('libnvidia-ml.so.1: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchrec", raising=False)
    with pytest.raises(ImportError, match=r"libnvidia-ml\.so\.1.*no CUDA driver") as caught:
        import_module("torchrec")
    assert caught.value.__suppress_context__, "no traceback of FBGEMM stands before the commands"
    commands = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert commands == [UNINSTALL, f"{FOR_CPU}{NEWEST[1]}"]
    for page in ("README.md", "docs/install.md"):
        lines = [line.partition("#")[0].strip() for line in (ROOT / page).read_text().splitlines()]
        assert commands == [line for line in lines if line in commands], page


def test_what_is_installed_here_is_one_of_the_sets() -> None:
    """Check the installed set of releases, because a mixture fails far from its cause."""
    found = {one.metadata["Name"].replace("_", "-"): ".".join(one.version.split(".")[:2]) for one in distributions()}
    fitting = [".".join(release.split(".")[:2]) for release in FITTING[found["torch"]]]
    assert {"fbgemm-gpu", "fbgemm-gpu-cpu"} & set(found)
    assert {found.get("fbgemm-gpu", fitting[1]), found.get("fbgemm-gpu-cpu", fitting[1])} == {fitting[1]}
    assert found["torchrec"] == fitting[2]


@pytest.mark.slow
def test_setup_refuses_a_torch_it_has_no_set_for_and_leaves_the_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    script = ROOT / "scripts" / "setup_environment.py"
    done = subprocess.run([sys.executable, script, tmp_path, "torch199"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "'torch199'" in done.stderr and "torch214" in done.stderr
    assert (tmp_path / "kept").exists()


CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 7
  limit_val_batches: 2
  limit_test_batches: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  strategy: {class_path: lightning_freescale.FreeScaleStrategy, init_args: {checkpoint: single}}
  callbacks: [{class_path: lightning_freescale.BubbleProfiler, init_args: {trace_steps: 0}}]
  default_root_dir: FOLDER
data: {balance: {assignment_mode: slack}, num_workers: 1}
"""
EXAMPLE = ROOT / "examples" / "train.py"


def _forked(line: list[str]) -> tuple[int, str, str]:
    """Return status and output of a command line in a forked process, which saves the imports."""
    code, output = 0, (io.StringIO(), io.StringIO())
    sys.argv, sys.path[:0] = line, [str(EXAMPLE.parent)]
    os.chdir(ROOT)
    with redirect_stdout(output[0]), redirect_stderr(output[1]):
        try:
            runpy.run_path(line[0], run_name="__main__")
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return code, output[0].getvalue(), output[1].getvalue()


@pytest.mark.slow
def test_command_line_with_yaml(tmp_path: Path) -> None:
    path = tmp_path / "override.yaml"
    path.write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    line = [str(EXAMPLE), "fit", "--config", str(ROOT / "examples/configs/ml-latest-small.yaml"), "--config", str(path)]
    (code, printed, errors), (other, *_) = run_distributed(_forked, 2, line, init=False)
    assert code == other == 0, errors[-3000:]
    assert "2 ranks on cpu, 2 steps" in printed


def _strategy_of(*options: str) -> FreeScaleStrategy:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=FreeScaleStrategy)
    line = [f"--strategy.{option}" for option in options]
    parsed = parser.parse_args(["--strategy=lightning_freescale.FreeScaleStrategy", *line])
    return parser.instantiate_classes(parsed).strategy


def test_options_can_stand_in_yaml() -> None:
    assert _strategy_of("ids_of=lightning_freescale.data.collate_histories").ids_of is collate_histories
    assert _strategy_of("overlap=torchrec").by_torchrec
    for text, value in (("auto", "auto"), ("0", 0), ("7", 7), ("0.5", 0.5), ("1.0", 1.0)):
        others = ["rerank_every_n_steps=50"] if value else []  # refused without hot rows
        hot_rows = _strategy_of(f"hot_rows={text}", *others).hot_rows_option
        assert (hot_rows, type(hot_rows)) == (value, type(value)), "1 is one row, and 1.0 all ranks of a node"
    with pytest.raises(Exception, match="overlap"):
        _strategy_of("overlap=tree")


# -- the wheel


METADATA = f"lightning_freescale-{lightning_freescale.__version__}.dist-info"
KINDS = {".css", ".html", ".js", ".py"}
"""The suffixes of files in the package: code, and the parts of the report's page."""
ALSO = {"lightning_freescale/limits.md", "lightning_freescale/py.typed", "lightning_freescale/profiling/reporting/schema.json"}


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    wheel = zipfile.ZipFile(next(tmp_path.iterdir()))
    packaged = {name for name in wheel.namelist() if not name.startswith(f"{METADATA}/")}
    assert {name.split("/")[0] for name in packaged} == {"lightning_freescale"}, "no tests, benchmarks or examples"
    assert sorted(name for name in packaged - ALSO if Path(name).suffix not in KINDS) == [], "no data"
    package = ROOT / "lightning_freescale"
    page = {path.relative_to(ROOT).as_posix() for path in package.rglob("page/*") if path.is_file()}
    assert any(name.endswith("/page.html") for name in page) and ALSO | page <= packaged
    modules = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    assert {name for name in packaged if name.endswith(".py")} == modules
    metadata = message_from_string(wheel.read(f"{METADATA}/METADATA").decode())
    assert metadata["Version"] == lightning_freescale.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert f"{METADATA}/licenses/LICENSE" in wheel.namelist()
    written, module = ConfigParser(), "lightning_freescale.command_line.profiled_script"
    written.read_string(wheel.read(f"{METADATA}/entry_points.txt").decode())
    assert {name: dict(section) for name, section in written.items() if name.endswith("callbacks_factory")} == {
        "lightning.pytorch.callbacks_factory": {"freescale": f"{module}:callbacks_of_run"},
        "pytorch_lightning.callbacks_factory": {"freescale": f"{module}:refuse_other_trainer"},
    }


@pytest.mark.slow
def test_the_import_of_torchrec_prints_no_deprecation() -> None:
    code = """
import lightning_freescale.embeddings, torch
from torchrec import KeyedJaggedTensor
KeyedJaggedTensor(keys=["a"], values=torch.ones(1, dtype=torch.long), lengths=torch.ones(1, dtype=torch.long))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stderr) == (0, "")
