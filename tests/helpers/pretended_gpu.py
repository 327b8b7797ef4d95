"""A GPU made of the CPU's memory, in a process that ends with the test.

A tensor is on it or on the host, says so, and what mixes the two fails as it would on a GPU. Numbers are the CPU's, so that a
run "on CUDA" can be compared to the bit. The kernels of CUDA are not run.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tests.helpers.thread_mode import ThreadMode

GPU = torch.device("cuda", 0)
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_UNCHECKED = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.mul.out)
"""Copies, and what DDP does with buckets that it makes in C++."""
_WAITS = {Tensor.item, Tensor.tolist, Tensor.nonzero, torch.nonzero, Tensor.__bool__, Tensor.__int__, Tensor.__float__}


class PretendedGPU:
    """Knows which memory is the GPU's.

    Attributes:
        waits: how often the host would have waited for the GPU, by thread.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self._memory: dict[int, Any] = {}  # kept, or an address would be met again as other memory

    @contextmanager
    def active(self) -> Iterator[None]:
        with _Names(self), _Places(self):
            yield

    def take(self, *tensors: Tensor) -> None:
        """Let tensors be on the GPU that were made outside."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._memory[storage._cdata] = storage

    def give_back(self, *tensors: Tensor) -> None:
        """Let tensors be on the host."""
        for tensor in tensors:
            self._memory.pop(tensor.untyped_storage()._cdata, None)

    def holds(self, tensor: Tensor) -> bool:
        try:
            return tensor.untyped_storage()._cdata in self._memory
        except (NotImplementedError, RuntimeError):  # has no storage
            return False

    def wait(self) -> None:
        self.waits[threading.current_thread().name] += 1


class _Names(TorchFunctionMode):
    """What Python asks a tensor, and asks for: where it is, and where it is to be."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu = dict(kwargs or {}), self._gpu
        if func == Tensor.device.__get__:
            return GPU if gpu.holds(args[0]) else func(*args)
        if func == Tensor.is_cuda.__get__:
            return gpu.holds(args[0])
        if func == Tensor.is_cpu.__get__:
            return not gpu.holds(args[0])
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if func is Tensor.cpu:
            return self._to(args[0], torch.device("cpu"))
        if func in (Tensor.numpy, Tensor.__array__) and gpu.holds(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        if func in _WAITS and gpu.holds(args[0]):
            gpu.wait()
        kwargs.pop("pin_memory", None)
        if func is Tensor.new_tensor:
            kwargs.setdefault("device", GPU if gpu.holds(args[0]) else "cpu")
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        there = torch.device(kwargs.pop("device")).type == "cuda"
        made = func(*args, **kwargs)
        (gpu.take if there else gpu.give_back)(*pytree.tree_leaves(made))
        return made

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        here = self._gpu.holds(tensor)
        if args and isinstance(args[0], Tensor):
            there = self._gpu.holds(args[0])
        else:
            there = here if device is None else device.type == "cuda"
        if there == here:
            return tensor.to(dtype=tensor.dtype if dtype is None else dtype)
        moved = tensor.to(dtype=dtype, copy=True)
        (self._gpu.take if there else self._gpu.give_back)(moved)
        if not non_blocking:
            self._gpu.wait()
        return moved


class _Places(ThreadMode):
    """Where the result of every operation is, also of those behind Python's back, and what no operation takes together."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, holds = kwargs or {}, self._gpu.holds
        name = func.overloadpacket.__name__
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        checked = given
        if name in _INDEXING:  # numbers of the host may choose from the GPU's memory, not the other way round
            indices = [each for each in pytree.tree_leaves(args[1]) if isinstance(each, Tensor)]
            checked = [args[0], *args[2:3], *(each for each in indices if holds(each))]
        places = {holds(each) for each in checked if each.dim() or holds(each)}  # a number of the host goes with all
        if len(places) > 1 and func not in _UNCHECKED:
            where = ", ".join(f"{'GPU' if holds(each) else 'host'} {tuple(each.shape)}" for each in checked)
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, got {where}")
        made = func(*args, **kwargs)
        if any(map(holds, given[:1] if name in _INDEXING else given)):
            known = {each.untyped_storage()._cdata for each in given}
            new = [each for each in pytree.tree_leaves(made) if isinstance(each, Tensor)]
            self._gpu.take(*(each for each in new if each.untyped_storage()._cdata not in known))
        return made
