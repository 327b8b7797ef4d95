"""What is known of a batch while its rows and gradients travel."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_path import KJTSnapshot
from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest, RowSubset


@dataclass(frozen=True)
class Lookup:
    """One lookup that the model has made in a step.

    Attributes:
        features: the ids.
        predicted: whether they were submitted ahead; None if none were.
    """

    features: KeyedJaggedTensor
    predicted: bool | None


@dataclass
class FurtherLookup:
    """A lookup whose ids were not submitted, after another one in the same step; filled in by the collection's worker.

    Attributes:
        features: the ids.
        rows: the rows that came, shape ``[rows, dim]``.
        places: which of them each id is, shape ``[ids]``.
    """

    features: KeyedJaggedTensor
    rows: Tensor = field(init=False)
    places: Tensor = field(init=False)


@dataclass
class EvaluationLookup:
    """A lookup outside of steps, in which every rank looks up one module or none; filled in by the collection's worker.

    Attributes:
        module: number of the module that this rank looks up, from 1 on; 0 for none.
        features: its ids; None if this rank looks up nothing of this collection.
        modules: the same numbers of all ranks.
        error: what is wrong with the ids of any rank; None if nothing is.
        rows: the rows that came, shape ``[rows, dim]``.
        places: which of them each id is, shape ``[ids]``.
    """

    module: int
    features: KeyedJaggedTensor | None
    modules: list[int] = field(init=False)
    error: ValueError | None = field(init=False, default=None)
    rows: Tensor = field(init=False)
    places: Tensor = field(init=False)


@dataclass(frozen=True)
class ForwardedRows:
    """The same rows where this rank is a proxy.

    Attributes:
        asked: of those that it is asked for by its node.
        request_rows: of those that it requests itself.
        request: the whole of these.
    """

    asked: RowSubset
    request_rows: RowSubset
    request: RowRequest


@dataclass(frozen=True)
class SomeRows:
    """Some rows of a batch: of those that this rank requests, and of those requested from it as an owner, or as a proxy."""

    requested: RowSubset
    incoming: RowSubset
    forwarded: ForwardedRows | None = None


@dataclass(frozen=True)
class PassingRows:
    """Rows that this rank, as a proxy, has for its node until the last of them have come.

    Attributes:
        rows: the slots that they came in, shape ``[places, dim]``.
        places: where in ``rows`` each row is that the node's ranks have asked for.
        late_places: where in ``rows`` those belong that come after the backward of the batch before.
    """

    rows: Tensor
    places: Tensor
    late_places: Tensor


@dataclass
class PipelinedBatch:
    """One batch of a collection; filled in by the collection's worker.

    Attributes:
        number: later batches have higher ones.
        request: the rows this rank needs.
        incoming: the rows this rank gives as an owner.
        rows: the slots that the rows came in, shape ``[places, dim]``.
        places: where in ``rows`` the row of each id is, shape ``[ids]``.
        late_places: where in ``rows`` those belong that come after the backward of the batch before.
        passing: its rows that this rank has as a proxy; None without proxies, or once all have come.
        settings: what its update is computed with, by the tables' places in the layout.
        updates: whether an optimizer step follows it; else its gradients are kept for the next one.
        held: whether its gradients, with those kept before, are held by the owners until they are clipped.
        compared: whether its rows were compared with those of the batch after it.
        changes_all: whether every row of a table may be updated after it: no row of the batch after it is fetched before that.
        whole_used: whether its loss is over all rows of a table.
        any_submitted: whether any rank has submitted its ids ahead.
        submitted: whether this rank has.
        all_submitted: whether all have, without error or disagreement.
        heard: whether all ranks have told what they know of its ids.
        forward_first: taken by what comes first: the end of the forward before, or that it is to be waited for.
        ended_ranks: ranks that have said that they have no such batch.
        mode: the highest mode of any rank, see :class:`OverlappedCollection`.
        submitted_ids: what was submitted ahead, by lookup, before the model looks it up; None if nothing was.
        ready: done when ``rows`` are complete.
        awaited: the rows that the batch before it updates, so that their values come late; None if they were not compared.
        urgent: the rows that the batch after it needs, so that their gradients go first; None if they were not compared.
        patient: all other rows; their gradients go with the ids of the batch after the next.
        gradient: of the requested rows, once backward has been there.
        looked_up: whether the model has looked it up.
        gradient_sent: whether its gradients have been handed over.
        pooled_rows: pooled rows that TorchRec would have sent to this rank, by the rank that sends them, shape ``[ranks]``;
            counted for collections of bags, else 0.
    """

    number: int
    request: RowRequest
    incoming: IncomingRows
    rows: Tensor
    places: Tensor
    late_places: Tensor | None = None
    passing: PassingRows | None = None
    settings: Sequence[UpdateSettings] = ()
    updates: bool = True
    held: bool = False
    compared: bool = True
    changes_all: bool = False
    whole_used: bool = False
    any_submitted: bool = False
    submitted: bool = False
    all_submitted: bool = False
    heard: bool = False
    forward_first: Lock = field(default_factory=Lock)
    ended_ranks: list[int] = field(default_factory=list)
    mode: int = 0
    submitted_ids: list[KJTSnapshot] | None = None
    ready: Future[Any] | None = None
    awaited: SomeRows | None = None
    urgent: SomeRows | None = None
    patient: SomeRows | None = None
    gradient: Tensor | None = None
    looked_up: bool = False
    gradient_sent: bool = False
    pooled_rows: np.ndarray | int = 0
