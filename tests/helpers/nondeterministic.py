"""Operations whose result may differ from run to run on CUDA, by what torch documents, seen while they run on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.helpers.stream_clocks import place_in_package
from tests.helpers.thread_mode import ThreadMode

Predicate = Callable[..., bool]


class Rule(NamedTuple):
    """``form`` says of the arguments, and of the result, whether it is the form that torch documents, from ``since`` on."""

    documented: str
    form: Predicate = lambda *args, **kwargs: True
    since: tuple[int, int] = (2, 13)


def _overwrites(result: Tensor, target: Tensor, indices: list[Any], values: Tensor, accumulate: bool = False) -> bool:
    """Whether different values were written to one place: which of them stays is chance; equal ones do no harm."""
    return not accumulate and not torch.equal(result[indices], values.expand_as(result[indices]))


def _scatter_overwrites(result: Tensor, target: Tensor, dim: int, index: Tensor, source: Any = None, **kwargs: Any) -> bool:
    return isinstance(source, Tensor) and not torch.equal(result.gather(dim, index), source)


def _copy_overwrites(result: Tensor, target: Tensor, dim: int, index: Tensor, source: Tensor) -> bool:
    return not torch.equal(result.index_select(dim, index), source)


def _has_weights(result: Tensor, given: Tensor, weights: Tensor | None = None, *args: Any) -> bool:
    return weights is not None


def _is_float(result: Any, *args: Any, **kwargs: Any) -> bool:
    return result.is_floating_point()


def _has_indices(result: Any, *args: Any, **kwargs: Any) -> bool:
    return not isinstance(result, Tensor)


def _takes_largest(result: Any, *args: Any, **kwargs: Any) -> bool:
    return args[8] == 2  # mode="max"


_INDEX_PUT = Rule("torch.Tensor.index_put` with ``accumulate=False``", _overwrites)
_INDEX_ADD = Rule("torch.index_add` when called on CUDA tensor")
_PUT = Rule("torch.Tensor.put_` when ``accumulate=True`` and called on a CUDA tensor")
RULES = {
    "index_put": _INDEX_PUT,
    "index_put_": _INDEX_PUT,
    "_index_put_impl_": _INDEX_PUT,
    "index_add": _INDEX_ADD,  # that is also what index_select and repeat_interleave do in backward
    "index_add_": _INDEX_ADD,
    "scatter_add": Rule("torch.Tensor.scatter_add_` when called on a CUDA tensor"),  # so does gather in backward
    "scatter_add_": Rule("torch.Tensor.scatter_add_` when called on a CUDA tensor"),
    "scatter": Rule("torch.Tensor.scatter` when `src` type is Tensor", _scatter_overwrites),
    "scatter_": Rule("torch.Tensor.scatter` when `src` type is Tensor", _scatter_overwrites),
    "scatter_reduce": Rule("torch.Tensor.scatter_reduce` when ``reduce='sum'``"),
    "scatter_reduce_": Rule("torch.Tensor.scatter_reduce` when ``reduce='sum'``"),
    "index_copy": Rule("torch.Tensor.index_copy` when called on a CPU or CUDA tensor", _copy_overwrites),
    "index_copy_": Rule("torch.Tensor.index_copy` when called on a CPU or CUDA tensor", _copy_overwrites),
    "put": _PUT,
    "put_": _PUT,
    "bincount": Rule("torch.bincount` when called on a CUDA tensor and ``weights``", _has_weights),
    "cumsum": Rule("torch.cumsum` when called on a CUDA tensor when dtype is floating", _is_float),
    "histc": Rule("torch.histc` when called on a CUDA tensor"),
    "median": Rule("torch.median` with indices output", _has_indices),
    "nll_loss_forward": Rule("torch.nn.NLLLoss` when called on a CUDA tensor"),
    "embedding_dense_backward": Rule("torch.nn.Embedding` when attempting to differentiate", since=(2, 14)),
    "_embedding_bag_backward": Rule("torch.nn.EmbeddingBag` when attempting to differentiate", _takes_largest),
}  # fmt: skip
"""By the name of the operation."""
_OF_IMAGES = re.compile(
    "Conv|Pad|Pool|Unpool|interpolate|grid_sample|CTCLoss|resize_|bmm|``(linear|bilinear|bicubic|trilinear)``"
)
"""What of torch's list no table and no exchange of rows comes near."""
_SEEN_AS = re.compile("gather|index_select|repeat_interleave|__getitem__")
"""What is on the list for its backward, which ends in one of the operations above."""


def undocumented() -> list[str]:
    """Return the rules that torch's list does not hold, and what it holds that no rule is for."""
    listed = [" ".join(text.split()) for text in re.split(r"\n\s+\* ", str(torch.use_deterministic_algorithms.__doc__))[1:]]
    here = tuple(int(part) for part in torch.__version__.split(".")[:2])
    documented = {rule.documented for rule in RULES.values() if rule.since <= here}
    wrong = [text for text in documented if not any(text in line for line in listed)]
    others = [line for line in listed if not _OF_IMAGES.search(line) and not _SEEN_AS.search(line)]
    covered = tuple(re.sub(r"_?`.*", "", text) for text in documented)
    return wrong + [line for line in others if not any(name in line for name in covered)]


class WatchDeterminism(ThreadMode):
    """Notes in ``found`` what is not deterministic on CUDA, and where in the package, and in ``seen`` what is on the list."""

    def __init__(self, found: set[str], seen: list[str]) -> None:
        super().__init__()
        self._found, self._seen = found, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        rule = RULES.get(name)
        if rule is not None:
            self._seen.append(name)
            if rule.form(result, *args, **(kwargs or {})):
                self._found.add(f"{name} at {place_in_package()}: {rule.documented}")
        return result
