"""TorchRec is needed for sharded embeddings and jagged batches, not for the rest of the package."""

from importlib import import_module


def require_torchrec() -> None:
    """Import TorchRec, or say how to get it.

    Raises:
        ImportError: TorchRec or FBGEMM is missing or does not load.
    """
    try:
        import_module("torchrec")
    except ImportError as error:
        raise ImportError(
            f"this needs TorchRec, which does not load here ({error}). With a CUDA GPU: pip install torchrec==1.8.0. Without: "
            "pip install fbgemm-gpu-cpu==1.8.0, then pip install torchrec==1.8.0 without its dependencies (--no-deps)"
        ) from error
