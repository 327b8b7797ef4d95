"""Checks of the installed TorchRec, which only sharded embeddings and jagged batches need."""

import warnings
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
            f"cannot import TorchRec ({cause}). Installed: {_installed()}. pip installs fbgemm-gpu, FBGEMM's build for CUDA, "
            "which needs torch's build for CUDA and a driver. The build for the CPU, fbgemm-gpu-cpu, uses the same "
            "folder. Both need a specific minor version of torch. " + _commands(all_found=not isinstance(error, ImportError))
        ) from error


def warn_of_fbgemm_for_cuda() -> None:
    """Warn if FBGEMM cannot load because it is built for CUDA and torch is not.

    Without the warning, a module that imports TorchRec itself fails with only the name of a library.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    built = _release("fbgemm-gpu")
    if built and "cpu" not in built and not _release("fbgemm-gpu-cpu"):
        warnings.warn(
            f"TorchRec cannot be imported, because FBGEMM is built for CUDA and torch is not. Installed: {_installed()}. "
            + _commands(all_found=True),
            stacklevel=3,
        )


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
    """Return commands to install TorchRec. Without a GPU, they keep a compatible one, because pip would add FBGEMM for CUDA."""
    fits = _minor(torch.__version__) in FITTING
    torch_release, fbgemm, torchrec = FITTING[_minor(torch.__version__)] if fits else list(FITTING.values())[-1]
    first = [] if fits else [f"torch=={torch_release}"]
    if not all_found or _minor(_release("torchrec")) != _minor(torchrec):
        first.append(f"torchrec=={torchrec}")
    without_gpu = [f"pip install {' '.join(first)}"] if first else []
    without_gpu += ["pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu", f"pip install fbgemm-gpu-cpu=={fbgemm}"]
    torch_for_cuda = [] if fits and torch.version.cuda else [f"torch=={torch_release}"]
    with_gpu = [
        f"pip uninstall -y {'torch ' if torch_for_cuda else ''}fbgemm-gpu fbgemm-gpu-cpu",
        f"pip install {' '.join([*torch_for_cuda, f'fbgemm-gpu=={fbgemm}', f'torchrec=={torchrec}'])}",
    ]
    return "\n    ".join(["Without a CUDA GPU, run", *without_gpu]) + "\n" + "\n    ".join(["With a CUDA GPU, run", *with_gpu])
