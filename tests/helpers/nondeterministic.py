"""Operations whose result may differ from run to run on CUDA, as ``torch.use_deterministic_algorithms`` lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.helpers.stream_clocks import place_in_package
from tests.helpers.thread_mode import ThreadMode


def _overwrites(result: Tensor, target: Tensor, indices: list[Any], values: Tensor, accumulate: bool = False) -> bool:
    """Whether different values were written to one place: which of them stays is chance; equal ones do no harm."""
    return not accumulate and not result[indices].equal(values.expand_as(result[indices]))


_ALWAYS = ("index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce", "put", "embedding_dense_backward")
_FORMS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(_ALWAYS, lambda *args, **kwargs: True),
    "index_put": _overwrites,
    "_index_put_impl": _overwrites,
    "bincount": lambda result, given, weights=None, *args: weights is not None,
    "cumsum": lambda result, *args, **kwargs: result.is_floating_point(),
    "_embedding_bag_backward": lambda *args, **kwargs: args[9] == 2,  # mode="max"
}
"""By the name of the operation without the underscore at its end, whether its arguments and result are of the listed form."""


class WatchDeterminism(ThreadMode):
    """Notes in ``found`` what is not deterministic on CUDA, and where in the package, and in ``seen`` what is on the list."""

    def __init__(self, found: set[str], seen: list[str]) -> None:
        super().__init__()
        self._found, self._seen = found, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        form = _FORMS.get(name.removesuffix("_"))
        if form is not None:
            self._seen.append(name)
            if form(result, *args, **(kwargs or {})):
                self._found.add(f"{name} at {place_in_package()}")
        return result
