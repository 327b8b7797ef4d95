"""Check and read a folder that another program has written with torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_freescale._runtime.error_text import error_text
from lightning_freescale.checkpoint import sharded_folder
from lightning_freescale.checkpoint.held_files import MANIFEST, OF_TORCH, HeldFiles
from lightning_freescale.checkpoint.sharded_folder import StoredPieces, StoredTensor
from lightning_freescale.embeddings.row_order import RowOrder


def read(folder: HeldFiles) -> dict[str, Any]:
    """Read the entries; large tensors stay in the folder, and objects are None."""
    pieces, found = StoredPieces(folder), dict[str, Any]()
    for name, stored in pieces.metadata.state_dict_metadata.items():
        value: StoredTensor | Tensor | None = None
        if isinstance(stored, TensorStorageMetadata):
            order = RowOrder(stored.size[0]) if stored.size else None
            tensor = StoredTensor(name, stored.size, stored.properties.dtype, order, pieces)
            value = tensor if prod(tensor.shape) * tensor.dtype.itemsize >= sharded_folder.LARGE else tensor.whole()
        set_element(found, pieces.metadata.planner_data.get(name, (name,)), value)
    return found


def damage(folder: HeldFiles) -> str:
    """Return a description of the damage to the files; empty if there is none.

    Raises:
        OSError: a file that is there could not be read.
    """
    try:
        pieces = StoredPieces(folder) if (folder / OF_TORCH).is_file() else None
    except (OSError, MemoryError):
        raise
    except Exception as error:  # damage makes pickle raise errors of many types
        return f"its {OF_TORCH} cannot be read ({error_text(error)})"
    # DCP's planner notes nested names, and an incomplete folder of strategy 'freescale' has none
    if pieces is None or pieces.metadata.planner_data is None:
        return (
            f"it has no {MANIFEST} of strategy 'freescale', and it is not a folder of torch.distributed.checkpoint, or it is "
            "incomplete"
        )
    ends: dict[str, int] = {}
    for each in pieces.metadata.storage_data.values():
        ends[each.relative_path] = max(ends.get(each.relative_path, 0), each.offset + each.length)
    for name, size in ends.items():
        if not (folder / name).is_file():
            return f"the file {name} is missing"
        if (folder / name).stat().st_size < size:
            return f"the file {name} has {(folder / name).stat().st_size} bytes instead of {size}"
    return ""
