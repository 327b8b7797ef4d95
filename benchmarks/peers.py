"""Published assignment methods of other packages, from a folder that ``fetch_peers.py`` creates.

Each takes history lengths and costs as lists of whole numbers, and the number of ranks, and returns the samples of each rank.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Peer = Callable[[list[int], list[int], int], Sequence[Sequence[int]]]
_VERL, _NVIDIA = "verl/verl/utils/seqlen_balancing.py", "recsys-examples/examples/commons/perf_model/partitioner.py"
_NOT_NEEDED = {
    "verl": [],
    "verl.protocol": ["DataProto"],
    "verl.utils": ["tensordict_utils"],
    "verl.utils.device": ["get_device_name"],
}
"""What verl's file imports for functions that are not called here, with what it imports from there."""


def load_peers(folder: Path) -> dict[str, Peer]:
    """Return the methods in ``folder`` by name.

    ``verl`` and ``nvidia`` are multiway largest differencing (Karmarkar and Karp 1982) at equal counts, in Python and, if it
    could be compiled, in C++; ``nvidia_free`` is the latter at any counts. ``hf`` is the grouping of
    ``train_sampling_strategy="batch_rebalance"``, made for padded batches: contiguous groups of the samples sorted by length.
    """
    verl, nvidia, sampler = _verl(folder / _VERL), _nvidia(folder / _NVIDIA), _transformers(folder / "site")
    peers: dict[str, Peer] = {
        "verl": lambda lengths, costs, ranks: verl.get_seqlen_balanced_partitions(costs, ranks, equal_size=True),
        "nvidia": lambda lengths, costs, ranks: nvidia.karmarkar_karp(costs, ranks, equal_size=True),
        "nvidia_free": lambda lengths, costs, ranks: nvidia.karmarkar_karp(costs, ranks, equal_size=False),
    }
    if sampler is None:
        print(f"skipped Hugging Face's method: transformers is neither installed nor in {folder / 'site'}")
        return peers
    # every rank of the sampler computes the groups of all, and yields its own
    return peers | {
        "hf": lambda lengths, costs, ranks: [
            batches[0] for batches in sampler(lengths, len(lengths), ranks, grad_accum=1)._assign(range(len(lengths)), lengths)
        ]
    }


def rank_of_sample(parts: Sequence[Sequence[int]], samples: int) -> NDArray[np.int64]:
    """Return a method's result as a plan, shape ``[samples]``; raise ValueError if a sample is in none or in several."""
    if sorted(sample for part in parts for sample in part) != list(range(samples)):
        raise ValueError(f"the parts of a method are no partition of {samples} samples: {parts!r:.200}")
    plan = np.empty(samples, dtype=np.int64)
    for rank, part in enumerate(parts):
        plan[list(part)] = rank
    return plan


def _verl(path: Path) -> ModuleType:
    stand_ins = {name: ModuleType(name) for name in _NOT_NEEDED}
    for name, parts in _NOT_NEEDED.items():
        for part in parts:
            setattr(stand_ins[name], part, None)
    sys.modules.update(stand_ins)
    try:
        return _load(path, "seqlen_balancing")
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _nvidia(path: Path) -> ModuleType:
    module = _load(path, "partitioner")
    if not torch.cuda.is_available():
        module.nvtx = None  # torch's raises without CUDA; None is what the file itself has without torch
    return module


def _transformers(site: Path) -> Any:
    sys.path.append(str(site))  # last, so installed packages have priority
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    return BatchRebalanceSampler


def _load(path: Path, name: str) -> ModuleType:
    if not path.exists():
        sys.exit(f"--peers: {path} does not exist; python benchmarks/fetch_peers.py FOLDER fetches it")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
