"""A trial run of a training step ahead of time, only to see which ids it looks up.

fx tracing would tell them, too, but fails on LightningModules: ``self.log``, control flow, dict batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from collections.abc import Collection as Group
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_freescale._lightning.loops import LightningModule
from lightning_freescale.embeddings.collections import Collection, replace_everywhere
from lightning_freescale.embeddings.overlap.row_layout import output_names
from lightning_freescale.strategy.preserve_state import preserve_module_state


@dataclass(frozen=True)
class CollectionOutput:
    """What stands in for a collection must know of it.

    Attributes:
        module: what stands in the LightningModule.
        outputs: name in its result, feature and width of everything it returns, in order.
        pooled: whether it is an EmbeddingBagCollection.
        need_indices: whether it returns the ids as weights.
    """

    module: nn.Module
    outputs: tuple[tuple[str, str, int], ...]
    pooled: bool = False
    need_indices: bool = False

    @classmethod
    def from_collection(cls, collection: Collection, module: nn.Module) -> CollectionOutput:
        """Describe one that :func:`find_collections` has found."""
        features = [(feature, table.dim) for table in collection.tables for feature in table.features]
        outputs = tuple((name, *feature) for name, feature in zip(output_names(collection), features))
        return cls(module, outputs, collection.pooled, collection.need_indices)


@dataclass(frozen=True)
class DryRunResult:
    """What a trial run has seen.

    Attributes:
        features: ids by the name of the collection; empty after an error.
        error: why nothing was seen.
    """

    features: dict[str, KeyedJaggedTensor] = field(default_factory=dict)
    error: Exception | None = None


def dry_run_ids(
    module: LightningModule,
    outputs: Mapping[str, CollectionOutput],
    args: tuple[Any, ...],
    device: torch.device,
    wanted: Group[str] | None = None,
    prepare: Callable[[Any], Any] | None = None,
) -> DryRunResult:
    """Return the ids that ``module.training_step(*args)`` would look up, without gradients, exchange or a trace of it.

    The step runs on a copy of ``args`` until every wanted collection was called; until then collections return zeros, so ids
    that depend on embeddings come out wrong. Their hooks do not run, nothing is logged by ``self.log``, and the module and
    the random states are afterwards as they were (:func:`preserve_module_state` says how far that goes). What else the step
    does before its lookups is done twice: writing to a logger or a file, collectives, changes of the trainer or of parameters.

    Args:
        module: the user's; DDP has no part in this. Autocast is the caller's.
        outputs: all of its collections by name.
        args: as for ``training_step``, on the device unless ``prepare`` brings the batch there.
        device: where it runs.
        wanted: names of the collections to wait for; all if not given.
        prepare: makes the batch that the step gets of the first of ``args``, with no more of a trace than the step.

    Returns:
        The first lookup of each collection that was called, or the error of the step.
    """
    if not module.automatic_optimization:
        return DryRunResult(error=RuntimeError("with automatic_optimization=False training_step would update the parameters"))
    seen: dict[str, KeyedJaggedTensor] = {}
    needed = frozenset(outputs if wanted is None else wanted)
    inside = {inner for output in outputs.values() for inner in output.module.modules()}
    try:
        given = copy.deepcopy(args)  # a step may pop from its batch, or change it in place
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), preserve_module_state(module, device, skip=inside):
            _install_stand_ins(module, outputs, seen, needed)
            batch = given[0] if prepare is None else prepare(given[0])
            with suppress(_AllSeen):
                module.training_step(batch, *given[1:])
    except Exception as error:
        return DryRunResult(error=error)
    return DryRunResult(seen)


class _AllSeen(BaseException):
    """Nothing more to see. No Exception, because a step may catch those."""


def _install_stand_ins(
    module: LightningModule,
    outputs: Mapping[str, CollectionOutput],
    seen: dict[str, KeyedJaggedTensor],
    needed: frozenset[str],
) -> None:
    """Put stand-ins where the collections are, and stop the logging; ``preserve_module_state`` puts everything back."""
    for name, output in outputs.items():
        replace_everywhere(module, output.module, _StandIn(name, output, seen, needed))
    for inner in module.modules():
        if isinstance(inner, LightningModule):
            vars(inner).update(log=_ignore, log_dict=_ignore, print=_ignore)


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


class _StandIn(nn.Module):
    """Looks like the collection, remembers the ids and returns zeros."""

    def __init__(self, name: str, output: CollectionOutput, seen: dict[str, KeyedJaggedTensor], needed: frozenset[str]) -> None:
        super().__init__()
        # past nn.Module, for which the collection would be a child
        vars(self).update(name=name, output=output, seen=seen, needed=needed)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["output"].module, name)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        if not isinstance(features, KeyedJaggedTensor):
            raise TypeError(f"collection {self.name!r} is given a {type(features).__name__}, no KeyedJaggedTensor")
        self.seen.setdefault(self.name, features)
        if self.needed <= self.seen.keys():
            raise _AllSeen
        return _pooled_zeros(self.output, features) if self.output.pooled else _zeros(self.output, features)


def _zeros(output: CollectionOutput, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    split = features.to_dict()  # on CUDA the host waits here for the lengths
    return {
        name: JaggedTensor(
            values=_blank(features, len(split[feature].values()), width),
            lengths=split[feature].lengths(),
            weights=split[feature].values() if output.need_indices else None,
        )
        for name, feature, width in output.outputs
    }


def _pooled_zeros(output: CollectionOutput, features: KeyedJaggedTensor) -> KeyedTensor:
    names, widths = [name for name, _, _ in output.outputs], [width for _, _, width in output.outputs]
    return KeyedTensor(names, widths, _blank(features, features.stride(), sum(widths)))


def _blank(features: KeyedJaggedTensor, *shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float32, device=features.device())  # TorchRec's, whatever the default is
