"""A trial run of a training step ahead of time, only to see which ids it looks up.

fx tracing would tell them, too, but fails on LightningModules: ``self.log``, control flow, dict batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_freescale._lightning.loops import LightningModule
from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.overlap.row_layout import output_names
from lightning_freescale.embeddings.plain_embedding import EmbeddingIds, rows_of_ids
from lightning_freescale.strategy.file_writes import FileWritesRefused
from lightning_freescale.strategy.preserve_state import preserve_state


@dataclass(frozen=True)
class DryRunResult:
    """What a trial run has seen.

    Attributes:
        features: ids by the path of the collection, by lookup; empty after an error.
        error: why nothing was seen.
    """

    features: dict[str, list[KeyedJaggedTensor]] = field(default_factory=dict)
    error: Exception | None = None


def dry_run_ids(
    module: LightningModule,
    collections: Sequence[tuple[Collection, nn.Module]],
    args: tuple[Any, ...],
    device: torch.device,
    wanted: Mapping[str, int] | None = None,
    prepare: Callable[[Any], Any] | None = None,
    beside: Mapping[str, Any] | None = None,
    leave: Iterable[Any] = (),
) -> DryRunResult:
    """Return the ids that ``module.training_step(*args)`` would look up, without gradients, exchange or a trace of it.

    The step runs on a copy of ``args`` until every wanted lookup was made; until then collections return zeros, so ids
    that depend on embeddings come out wrong. Their hooks do not run, nothing is logged by ``self.log``, no file is written, and
    all that the module leads to is afterwards as it was, or the step does not run (:func:`preserve_state`,
    :class:`FileWritesRefused`). What the step does elsewhere before its lookups is done twice: to globals, by collectives.

    Args:
        module: the user's; DDP has no part in this. Autocast is the caller's.
        collections: all of its collections, each with what stands in the module.
        args: as for ``training_step``, on the device unless ``prepare`` brings the batch there.
        device: where it runs.
        wanted: how many lookups to wait for, by the path of the collection; one of each if not given.
        prepare: makes the batch that the step gets of the first of ``args``, with no more of a trace than the step.
        beside: other objects that stay as they are, by what an error calls them.
        leave: objects that the module leads to and that may change.

    Returns:
        The lookups of each collection that was called, or the error of the step; a LeavesTraceError if it cannot run
        without a trace.
    """
    if not module.automatic_optimization:
        return DryRunResult(error=RuntimeError("with automatic_optimization=False training_step would update the parameters"))
    seen: dict[str, list[KeyedJaggedTensor]] = {}
    needed = dict.fromkeys((collection.path for collection, _ in collections), 1) if wanted is None else wanted
    instead = [(each, each) for each in leave]
    for collection, held in collections:
        instead += [(inner, inner) for inner in (*held.modules(), *held.parameters())]
        instead.append((held, _StandIn(collection, held, seen, needed)))
    roots = {"self": module, **(beside or {})}
    try:
        given = copy.deepcopy(args)  # a step may pop from its batch, or change it in place
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            preserve_state(roots, device, instead),
            FileWritesRefused(),
        ):
            for inner in module.modules():  # preserve_state puts it back
                if isinstance(inner, LightningModule):
                    vars(inner).update(dict.fromkeys(("log", "log_dict", "print"), lambda *args, **kwargs: None))
            batch = given[0] if prepare is None else prepare(given[0])
            with suppress(_AllSeen):
                module.training_step(batch, *given[1:])
    except Exception as error:
        return DryRunResult(error=error)
    return DryRunResult(seen)


class _AllSeen(BaseException):
    """Nothing more to see. No Exception, because a step may catch those."""


class _StandIn(nn.Module):
    """Looks like the collection, remembers the ids and returns zeros."""

    def __init__(
        self, collection: Collection, held: nn.Module, seen: dict[str, list[KeyedJaggedTensor]], needed: Mapping[str, int]
    ) -> None:
        super().__init__()
        # past nn.Module, for which the collection would be a child
        vars(self).update(collection=collection, held=held, seen=seen, needed=needed)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["held"], name)

    def forward(self, features: Any) -> Any:
        collection: Collection = self.collection
        if not collection.embedding:
            return self._look_up(features)
        found = self._look_up(EmbeddingIds(collection.path, features))
        return rows_of_ids(found, collection.path, features, None)

    def _look_up(self, features: KeyedJaggedTensor) -> Any:
        collection: Collection = self.collection
        if not isinstance(features, KeyedJaggedTensor):
            raise TypeError(f"collection {collection.path!r} is given a {type(features).__name__}, no KeyedJaggedTensor")
        self.seen.setdefault(collection.path, []).append(features)
        if all(len(self.seen.get(path, ())) >= count for path, count in self.needed.items()):
            raise _AllSeen
        zeros = partial(torch.zeros, dtype=torch.float32, device=features.device())  # TorchRec's, whatever the default is
        names, looked_up = output_names(collection), [(key, table.dim) for table in collection.tables for key in table.features]
        if collection.pooled:
            widths = [width for _, width in looked_up]
            return KeyedTensor(list(names), widths, zeros(features.stride(), sum(widths)))
        split = features.to_dict()  # on CUDA the host waits here for the lengths
        return {
            name: JaggedTensor(
                values=zeros(len(split[key].values()), width),
                lengths=split[key].lengths(),
                weights=split[key].values() if collection.need_indices else None,
            )
            for name, (key, width) in zip(names, looked_up)
        }
