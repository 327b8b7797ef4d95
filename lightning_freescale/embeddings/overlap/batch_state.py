"""The values that a batch holds while its rows and gradients travel, and the lookups that the model makes in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.id_prediction import KJTSnapshot
from lightning_freescale.embeddings.optimizer import UpdateSettings
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest, RowSubset


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


@dataclass(frozen=True)
class RequestedRows:
    """The rows of a batch that travel: its first value, known after exchange A.

    Attributes:
        request: the rows that this rank needs.
        incoming: the rows that this rank gives as an owner.
    """

    request: RowRequest
    incoming: IncomingRows


@dataclass
class BatchRows:
    """The values of the rows that this rank needs: its second value, there after exchange B, complete after D.

    Attributes:
        values: the slots that the rows arrive in, shape ``[places, dim]``.
        places: where in ``values`` the row of each id is, shape ``[ids]``.
        awaited: the rows that the batch before updates, so that their values come with D; None if they were not compared.
        late_places: where in ``values`` these rows belong.
        passing: rows that this rank has as a proxy; None without proxies, or once all have arrived.
    """

    values: Tensor
    places: Tensor
    awaited: SomeRows | None = None
    late_places: Tensor | None = None
    passing: PassingRows | None = None


@dataclass
class BatchGradients:
    """The gradients of the requested rows: its third value, there after backward, gone with C and the next A.

    Attributes:
        sums: one gradient per requested row, shape ``[rows, dim]``; None before backward and once all are sent.
        urgent: the rows that the batch after needs, so that their gradients go with C; None if they were not compared.
        patient: all other rows; their gradients go with the next A. None as for ``urgent``.
    """

    sums: Tensor | None = None
    urgent: SomeRows | None = None
    patient: SomeRows | None = None


@dataclass(frozen=True)
class Announced:
    """The state of a batch as all ranks have announced it, one step ahead.

    Attributes:
        heard: whether they have.
        submitted: whether this rank has submitted its ids.
        any_submitted: whether any rank has.
        all_submitted: whether all ranks have, without errors.
        ended_ranks: ranks that have no such batch.
        given_up: whether any rank gives up the prediction of ids.
    """

    heard: bool = False
    submitted: bool = False
    any_submitted: bool = False
    all_submitted: bool = False
    ended_ranks: Sequence[int] = ()
    given_up: bool = False


@dataclass
class StepUpdate:
    """How the step of a batch updates the tables; set by the training thread.

    Attributes:
        settings: of each table, by its place in the layout.
        updates: whether an optimizer step follows; else the gradients are kept for the next one.
        held: whether the owners hold the gradients, with those kept before, until they are complete and clipped.
        changes_all: whether every row may change, so that no row of the batch after is fetched before the update.
        whole_used: whether the loss is over all rows of a table.
        compared: whether the rows were compared with those of the batch after.
    """

    settings: Sequence[UpdateSettings] = ()
    updates: bool = True
    held: bool = False
    changes_all: bool = False
    whole_used: bool = False
    compared: bool = True


@dataclass
class Batch:
    """One batch of a collection; later batches have higher numbers. Its values are filled in by the collection's worker."""

    number: int
    requested: RequestedRows
    rows: BatchRows
    gradients: BatchGradients = field(default_factory=BatchGradients)
    announced: Announced = field(default_factory=Announced)
    update: StepUpdate = field(default_factory=StepUpdate)


@dataclass(frozen=True)
class Lookup:
    """One lookup that the model has made in a step.

    Attributes:
        features: the ids.
        predicted: whether they were submitted ahead; None if none were.
        index: which of those submitted ahead it is; None if it is none of them.
        first: whether it is the first of its step.
        announced: whether this rank had announced its lookups before it, because it waits or has waited elsewhere.
    """

    features: KeyedJaggedTensor
    predicted: bool | None
    index: int | None
    first: bool
    announced: bool


class StepLookups:
    """The lookups of one collection in one step.

    Args:
        submitted: the lookups submitted ahead; None if nothing was.
        take: called in backward when gradients have come, with whether some had come for the same rows before.

    Attributes:
        made: the lookups that the model has made, in its order.
    """

    def __init__(
        self, submitted: Sequence[KJTSnapshot] | None = None, take: Callable[[bool], None] = lambda again: None
    ) -> None:
        self.made: list[Lookup] = []
        self._take, self._predicts, self._submitted = take, submitted is not None, submitted or ()
        self._arrivals: list[_Arrival] = []
        self._kept: list[tuple[KJTSnapshot, Tensor]] = []

    def note(self, features: KeyedJaggedTensor, announced: bool = False) -> Lookup:
        """Note and return a lookup of the model, before its rows are waited for."""
        submitted = self._submitted
        left = self._arrivals[0].rows if self._arrivals and self._arrivals[0].asked_for else range(len(submitted))
        index = next((index for index in left if index < len(submitted) and submitted[index].matches(features)), None)
        predicted = index is not None if self._predicts else None
        self.made.append(Lookup(features, predicted, index, not self.made, announced))
        return self.made[-1]

    def receive(self, rows: Tensor, places: Tensor, sizes: Sequence[int], asked_for: bool) -> None:
        """Take rows that have come, shape ``[rows, dim]``, for one or more lookups of ``sizes`` ids.

        Args:
            rows: in any order.
            places: which of them each id is, shape ``[ids]``.
            sizes: ids of each lookup.
            asked_for: whether their owners know that this rank has them in this step; else they have only been served.
        """
        arrival = _Arrival(sizes, asked_for)
        self._arrivals.append(arrival)
        anchor = torch.empty(0, device=rows.device, requires_grad=True)
        given = _GraphEntry.apply(anchor, partial(self._take_gradients, arrival), rows, *places.split(list(sizes)))
        arrival.rows = dict(enumerate(given))

    def give_out(self, lookup: Lookup) -> Tensor:
        """Return the rows of the lookup just noted, shape ``[ids, dim]``, as part of the autograd graph."""
        index, arrival = lookup.index or 0, self._arrivals[0 if lookup.index is not None else -1]
        # as they are now: the gradient is of these rows, even if the ids are changed later
        snapshot = KJTSnapshot(lookup.features) if lookup.index is None else self._submitted[index]
        arrival.features[index] = snapshot.features
        rows = arrival.rows.pop(index)
        # what is saved by a hook, as activation checkpointing does, is not kept but may be asked for in backward
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            self._kept.append((snapshot, rows.detach().clone()))
        return rows

    def made_before(self, features: KeyedJaggedTensor) -> Tensor | None:
        """Return the rows of a lookup of the forward again, in backward; None if there was none with these ids."""
        rows = next((rows for snapshot, rows in self._kept if snapshot.matches(features)), None)
        # no leaf: it may be changed in place, as it was in forward
        return None if rows is None else rows.requires_grad_().clone()

    @property
    def all_gradients_came(self) -> bool:
        """Whether the gradients of all lookups have arrived; rows that were submitted and not looked up get none."""
        return all(arrival.gradients is not None for arrival in self._arrivals if arrival.features)

    def gradient(self, dim: int, none_is_not_zero: bool) -> tuple[Tensor | None, list[KeyedJaggedTensor] | None]:
        """Return the gradients of all ids, shape ``[ids, dim]``, and the lookups they are of if the owners know of others.

        Args:
            dim: width of a row.
            none_is_not_zero: whether an update by a gradient of zero would move a row.
        """
        if not self._arrivals:
            return None, None
        for arrival in self._arrivals:
            arrival.rows = {}  # whose graph holds this object
        came = [pair for arrival in self._arrivals for pair in arrival.came()]
        asked_for = self._arrivals[0] if self._arrivals[0].asked_for else None
        known = len(asked_for.came()) if asked_for is not None else 0
        if len(came) > known or (none_is_not_zero and asked_for is not None and known < len(asked_for.sizes)):
            return _joined([gradient for _, gradient in came]) if came else None, [features for features, _ in came]
        return asked_for.whole_gradient(dim) if asked_for is not None and came else None, None

    def _take_gradients(self, arrival: _Arrival, gradients: list[Tensor | None]) -> None:
        again, arrival.gradients = arrival.gradients is not None, gradients
        self._take(again)


@dataclass
class _Arrival:
    """Rows that have come together, for the lookups submitted ahead or for one that was not, and their gradients.

    Attributes:
        sizes: ids of each lookup.
        asked_for: whether the owners know of them.
        rows: of the lookups that the model has not made yet, each of shape ``[ids, dim]``.
        features: of those that it has made.
        gradients: of each lookup, None where none has arrived; None before backward.
    """

    sizes: Sequence[int]
    asked_for: bool
    rows: dict[int, Tensor] = field(default_factory=dict)
    features: dict[int, KeyedJaggedTensor] = field(default_factory=dict)
    gradients: list[Tensor | None] | None = None

    def came(self) -> list[tuple[KeyedJaggedTensor, Tensor]]:
        """Return the lookups whose gradients have arrived, with these."""
        gradients = enumerate(self.gradients or [])
        return [(self.features[index], gradient) for index, gradient in gradients if gradient is not None]

    def whole_gradient(self, dim: int) -> Tensor:
        """Return the gradients of all its lookups, zero where none has arrived."""
        assert self.gradients is not None
        some = next(gradient for gradient in self.gradients if gradient is not None)
        return _joined([some.new_zeros(size, dim) if g is None else g for g, size in zip(self.gradients, self.sizes)])


def _joined(gradients: list[Tensor]) -> Tensor:
    return torch.cat(gradients) if len(gradients) > 1 else gradients[0].contiguous()


class _GraphEntry(torch.autograd.Function):
    # Its backward hands the gradients to the worker, so the colliding rows travel while DDP still waits for its last bucket
    # and the dense optimizer steps. Autograd calls it once all lookups' gradients have come. Results are no views, so that
    # they may be changed in place.

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, take: Callable[[list[Tensor | None]], None], rows: Tensor, *places: Tensor) -> Any:
        ctx.take = take
        ctx.set_materialize_grads(False)
        return tuple(rows.index_select(0, each) for each in places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.take(list(gradients))
        return (None,) * (3 + len(gradients))
