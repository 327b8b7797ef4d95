"""Checks of the installed TorchRec, which only sharded embeddings and jagged batches need."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from logging import getLogger
from typing import Any

import torch

FITTING = {"2.13": ("2.13.0", "1.8.0", "1.8.0"), "2.14": ("2.14.1", "1.9.0", "1.9.2")}
"""Compatible releases of torch, FBGEMM and TorchRec by torch's minor version, oldest first. No metadata contains them."""


class TorchRecImportError(ImportError):
    """TorchRec is missing, or fails to load. The text ends with the commands that install it."""


def require_torchrec() -> None:
    """Import TorchRec, or raise an ImportError with the commands to install it."""
    with _explained(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
        import_module("torchrec.modules.hash_mc_modules")  # imports all of TorchRec that this package needs
    # each KeyedJaggedTensor calls torch's deprecated function, which no user can change
    getLogger("torch.fx._symbolic_trace").addFilter(lambda record: "is_fx_tracing will" not in str(record.msg))


class TorchRecFinder:
    """A finder for ``sys.meta_path``, with which a user's own import of TorchRec also ends with the commands.

    Otherwise it would end with the name of a library of FBGEMM.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of TorchRec with an import that explains errors, and None for all other modules."""
        spec = PathFinder.find_spec(name) if name == "torchrec" else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _explained()(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except TorchRecImportError:
        raise
    # OSError: a library is missing or built for another torch. AttributeError, RuntimeError: operators have another release.
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        cause = error.__cause__ or error  # FBGEMM's error names its library; the cause names the missing dependency
        raise TorchRecImportError(
            f"cannot import TorchRec ({cause}). Installed: {_installed()}. "
            + _commands(all_found=not isinstance(error, ImportError))
        ) from (None if isinstance(error, OSError) else error)


def _has_driver() -> bool:
    """Return whether the library of the CUDA driver loads, which FBGEMM for CUDA needs. This does not initialize CUDA."""
    try:
        CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _installed() -> str:
    found = {package: _release(package) for package in ("torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")}
    return f"torch {torch.__version__}, " + ", ".join(f"{name} {got}" if got else f"no {name}" for name, got in found.items())


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def _commands(all_found: bool) -> str:
    """Return the commands that install TorchRec on this machine.

    Without a driver, they do not install a TorchRec that fits again, because pip would also install FBGEMM for CUDA.
    """
    fits = _minor(torch.__version__) in FITTING
    torch_release, fbgemm, torchrec = FITTING[_minor(torch.__version__)] if fits else list(FITTING.values())[-1]
    uninstall = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu"
    if _has_driver():
        for_cuda = bool(fits and torch.version.cuda)
        found = "a CUDA driver, so torch and FBGEMM must be the builds for CUDA"
        commands = [
            uninstall if for_cuda else f"{uninstall} torch",
            f"pip install {'' if for_cuda else f'torch=={torch_release} '}fbgemm-gpu=={fbgemm} torchrec=={torchrec}",
        ]
    else:
        found = "no CUDA driver, so FBGEMM must be the build for the CPU"
        first = [] if fits else [f"torch=={torch_release}"]
        if not all_found or _minor(_release("torchrec")) != _minor(torchrec):
            first.append(f"torchrec=={torchrec}")
        commands = [f"pip install {' '.join(first)}"] if first else []
        commands += [uninstall, f"pip install fbgemm-gpu-cpu=={fbgemm}"]
    return "\n    ".join([f"This machine has {found}. Run", *commands])
