"""Checks of the installed TorchRec, which only sharded embeddings and jagged batches need."""

import warnings
from ctypes import CDLL
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from logging import getLogger

import torch

FITTING = {"2.13": ("2.13.0", "1.8.0", "1.8.0"), "2.14": ("2.14.1", "1.9.0", "1.9.2")}
"""Compatible releases of torch, FBGEMM and TorchRec by torch's minor version, oldest first. No metadata contains them."""


def require_torchrec() -> None:
    """Import TorchRec, or raise an ImportError with the commands to install it."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
            import_module("torchrec.modules.hash_mc_modules")  # imports all of TorchRec that this package needs
        # each KeyedJaggedTensor calls torch's deprecated function, which no user can change
        getLogger("torch.fx._symbolic_trace").addFilter(lambda record: "is_fx_tracing will" not in str(record.msg))
    # OSError: a library is missing or built for another torch. AttributeError, RuntimeError: operators have another release.
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        cause = error.__cause__ or error  # FBGEMM's error names its library; the cause names the missing dependency
        raise ImportError(
            f"cannot import TorchRec ({cause}). Installed: {_installed()}. "
            + _commands(all_found=not isinstance(error, ImportError))
        ) from error


def warn_of_fbgemm_for_cuda() -> None:
    """Warn if FBGEMM cannot load because it is built for CUDA, and torch is not or the machine has no driver.

    Without the warning, a module that imports TorchRec itself fails with only the name of a library.
    """
    built = _release("fbgemm-gpu")
    if not built or "cpu" in built or _release("fbgemm-gpu-cpu") or torch.version.hip is not None:
        return
    if torch.version.cuda is None or not _has_driver():
        lack = "torch is not" if torch.version.cuda is None else "no CUDA driver was found"
        cause = f"TorchRec cannot be imported, because FBGEMM is built for CUDA and {lack}"
        warnings.warn(f"{cause}. Installed: {_installed()}. {_commands(all_found=True)}", stacklevel=3)


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
