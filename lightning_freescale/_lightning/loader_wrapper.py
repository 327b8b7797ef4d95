"""A loader around another one that Lightning cannot tell from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# a loop of prediction takes the numbers of samples from this kind of sampler alone
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper


class LoaderWrapper:
    """Looks like the loader it wraps; subclasses say how it iterates.

    Args:
        loader: the loader.
        state_of: whose ``state_dict`` and ``load_state_dict`` to show instead of the loader's, if the loader has them.
        own: attributes of the wrapper itself; all others are set on the loader.
    """

    def __init__(self, loader: Any, state_of: Any = None, **own: Any) -> None:
        self.__dict__.update(_loader=loader, **own)
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            # in the instance: a runtime-checkable protocol does not look at __getattr__
            shown = loader if state_of is None else state_of
            self.__dict__.update(state_dict=shown.state_dict, load_state_dict=shown.load_state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # copy and pickle ask before there is a loader
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)  # Lightning sets worker_init_fn and resets _iterator

    def __len__(self) -> int:
        return len(self._loader)


class PredictionLoader(LoaderWrapper):
    """A loader whose batches a ``BasePredictionWriter`` gets together with the numbers of their samples.

    Args:
        loader: iterates over the samples that its ``sampler`` plans; a :class:`BalancedSampler` of one epoch.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, batch_sampler=_PlannedSamples(loader.sampler))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class _PlannedSamples(_IndexBatchSamplerWrapper):
    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    @property
    def seen_batch_indices(self) -> Any:  # type: ignore[override]
        return self

    def __len__(self) -> int:
        return len(self._sampler)

    def __getitem__(self, batch: int) -> list[int]:
        samples: list[int] = self._sampler.plan(self._sampler.epoch, batch)[self._sampler.rank].tolist()
        return samples
