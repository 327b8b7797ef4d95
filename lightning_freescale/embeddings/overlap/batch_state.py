"""State of a batch during its exchanges, and the lookups that the model makes in a step."""

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
from lightning_freescale.embeddings.overlap.row_requests import Forwarded, IncomingRows, RowRequest, RowSubset, joined


@dataclass(frozen=True)
class ForwardedRows:
    """The share of :class:`SomeRows` that takes two hops."""

    hot: RowSubset  # rows of this rank that are exchanged with the proxies of its node
    asked: RowSubset  # rows that the ranks of the node exchange with this rank as a proxy
    through: Forwarded  # of the whole batch


@dataclass(frozen=True)
class SomeRows:
    """A part of the rows of a batch."""

    requested: RowSubset  # requested by this rank from the owners; with hot rows, for the ranks of its node as well
    incoming: RowSubset  # requested from this rank as an owner
    forwarded: ForwardedRows | None = None  # None without hot rows


@dataclass(frozen=True)
class RequestedRows:
    """The rows of a batch that are exchanged; known after exchange A."""

    request: RowRequest  # rows that this rank needs
    incoming: IncomingRows  # rows that this rank sends as an owner


@dataclass
class BatchRows:
    """The values of the rows that this rank needs; available after exchange B, complete after exchange D."""

    values: Tensor  # slots of received rows in the form of messages, shape [places, words]
    places: Tensor  # index into values for each id, shape [ids]
    awaited: SomeRows | None = None  # rows that the batch before updates and D sends; None if they were not compared
    late_places: Tensor | None = None  # indices into values for the awaited rows that an owner sends
    # with hot rows, indices into values for the rows that the ranks of the node have asked this proxy for, and for the awaited
    # rows that a proxy sends
    passing: tuple[Tensor, Tensor] | None = None


@dataclass
class BatchGradients:
    """The gradients of the requested rows; available after backward, sent with exchange C and the next A."""

    sums: Tensor | None = None  # in the form of messages, shape [rows, words]; None before backward and once all are sent
    urgent: SomeRows | None = None  # rows that the batch after needs: sent with C; None if they were not compared
    patient: SomeRows | None = None  # all other rows: sent with the next A; None if they were not compared


@dataclass(frozen=True)
class Announced:
    """The state of a batch as announced by all ranks, one step ahead."""

    heard: bool = False  # whether all ranks have announced it
    submitted: bool = False  # whether this rank has submitted its ids
    any_submitted: bool = False
    all_submitted: bool = False  # without errors
    ended_ranks: Sequence[int] = ()  # ranks that have no such batch
    given_up: bool = False  # whether any rank gives up the prediction of ids


@dataclass
class StepUpdate:
    """The way in which the step of a batch updates the tables; set by the training thread."""

    settings: Sequence[UpdateSettings] = ()  # by index of the table in the layout
    updates: bool = True  # whether an optimizer step follows; otherwise the gradients are kept for the next one
    held: bool = False  # whether the owners hold all gradients of the window until they are complete and clipped
    changes_all: bool = False  # whether any row may change: no row of the batch after is fetched before the update
    whole_used: bool = False  # whether the loss is over all rows of a table
    compared: bool = True  # whether the rows were compared with those of the batch after


@dataclass
class Batch:
    """One batch of a collection. The worker of the collection fills in its values."""

    number: int  # later batches have higher numbers
    requested: RequestedRows
    rows: BatchRows
    gradients: BatchGradients = field(default_factory=BatchGradients)
    announced: Announced = field(default_factory=Announced)
    update: StepUpdate = field(default_factory=StepUpdate)


@dataclass(frozen=True)
class Lookup:
    """One lookup that the model has made in a step."""

    features: KeyedJaggedTensor
    predicted: bool | None  # whether its ids were submitted ahead; None if no ids were
    index: int | None  # index into the lookups submitted ahead; None if it is none of them
    first: bool  # whether it is the first of its step
    announced: bool  # whether this rank had announced its lookups before, because it waits or waited in another collection


class StepLookups:
    """The lookups of one collection in one step.

    ``submitted`` are the lookups submitted ahead; None if nothing was submitted. ``take`` is called in backward when gradients
    arrive, with whether gradients of the same rows arrived before.
    """

    def __init__(
        self, submitted: Sequence[KJTSnapshot] | None = None, take: Callable[[bool], None] = lambda again: None
    ) -> None:
        self.made: list[Lookup] = []
        self._take, self._predicts, self._submitted = take, submitted is not None, submitted or ()
        self._arrivals: list[_Arrival] = []
        self._kept: list[tuple[KJTSnapshot, Tensor]] = []

    def note(self, features: KeyedJaggedTensor, announced: bool = False) -> Lookup:
        """Record a lookup before the wait for its rows, and return it."""
        submitted = self._submitted
        left = self._arrivals[0].rows if self._arrivals and self._arrivals[0].asked_for else range(len(submitted))
        index = next((index for index in left if index < len(submitted) and submitted[index].matches(features)), None)
        predicted = index is not None if self._predicts else None
        self.made.append(Lookup(features, predicted, index, not self.made, announced))
        return self.made[-1]

    def receive(self, rows: Tensor, places: Tensor, sizes: Sequence[int], asked_for: bool) -> None:
        """Take rows that have arrived, shape ``[rows, dim]``, for lookups of ``sizes`` ids.

        ``places`` has the index of the row of each id. ``asked_for`` tells whether the owners count these rows as requested in
        this step; otherwise they only served them.
        """
        arrival = _Arrival(sizes, asked_for)
        self._arrivals.append(arrival)
        anchor = torch.empty(0, device=rows.device, requires_grad=True)
        given = _GraphEntry.apply(anchor, partial(self._take_gradients, arrival), rows, *places.split(list(sizes)))
        arrival.rows = dict(enumerate(given))

    def give_out(self, lookup: Lookup) -> Tensor:
        """Return the rows of the lookup recorded last, shape ``[ids, dim]``, as part of the autograd graph."""
        index, arrival = lookup.index or 0, self._arrivals[0 if lookup.index is not None else -1]
        # a snapshot of the ids: the gradient belongs to these rows, even if the ids are changed later
        snapshot = KJTSnapshot(lookup.features) if lookup.index is None else self._submitted[index]
        arrival.features[index] = snapshot.features
        rows = arrival.rows.pop(index)
        # activation checkpointing saves through hooks: it drops the rows and may look them up again in backward
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            self._kept.append((snapshot, rows.detach().clone()))
        return rows

    def made_before(self, features: KeyedJaggedTensor) -> Tensor | None:
        """Return the rows of a lookup of the forward again during backward; None if no lookup had these ids."""
        rows = next((rows for snapshot, rows in self._kept if snapshot.matches(features)), None)
        # not a leaf, so that the model may change it in place as in forward
        return None if rows is None else rows.requires_grad_().clone()

    @property
    def all_gradients_came(self) -> bool:
        """Whether the gradients of all lookups have arrived. Rows that were submitted but not looked up get none."""
        return all(arrival.gradients is not None for arrival in self._arrivals if arrival.features)

    def gradient(self, dim: int, none_is_not_zero: bool) -> tuple[Tensor | None, list[KeyedJaggedTensor] | None]:
        """Return the gradients of all ids, shape ``[ids, dim]``, and their lookups if the owners know of other ones.

        ``none_is_not_zero`` tells whether an update with a gradient of zero would change a row.
        """
        if not self._arrivals:
            return None, None
        for arrival in self._arrivals:
            arrival.rows = {}  # breaks a reference cycle: their graph holds this object
        came = [pair for arrival in self._arrivals for pair in arrival.came()]
        asked_for = self._arrivals[0] if self._arrivals[0].asked_for else None
        known = len(asked_for.came()) if asked_for is not None else 0
        if len(came) > known or (none_is_not_zero and asked_for is not None and known < len(asked_for.sizes)):
            return joined([gradient for _, gradient in came]).contiguous() if came else None, [features for features, _ in came]
        return asked_for.whole_gradient(dim) if asked_for is not None and came else None, None

    def _take_gradients(self, arrival: _Arrival, gradients: list[Tensor | None]) -> None:
        again, arrival.gradients = arrival.gradients is not None, gradients
        self._take(again)


@dataclass
class _Arrival:
    """Rows that have arrived together and their gradients: of the lookups submitted ahead, or of one other lookup."""

    sizes: Sequence[int]  # number of ids of each lookup
    asked_for: bool  # whether the owners count the rows as requested in this step
    rows: dict[int, Tensor] = field(default_factory=dict)  # of lookups that the model has yet to make, each [ids, dim]
    features: dict[int, KeyedJaggedTensor] = field(default_factory=dict)  # of lookups that the model has made
    gradients: list[Tensor | None] | None = None  # by lookup, None where none has arrived; None before backward

    def came(self) -> list[tuple[KeyedJaggedTensor, Tensor]]:
        gradients = enumerate(self.gradients or [])
        return [(self.features[index], gradient) for index, gradient in gradients if gradient is not None]

    def whole_gradient(self, dim: int) -> Tensor:
        """Return the gradients of all lookups, with zeros where none has arrived."""
        assert self.gradients is not None
        some = next(gradient for gradient in self.gradients if gradient is not None)
        given = zip(self.gradients, self.sizes)
        return joined([some.new_zeros(size, dim) if g is None else g for g, size in given]).contiguous()


class _GraphEntry(torch.autograd.Function):
    # Backward hands the gradients to the worker, so that colliding rows are exchanged while DDP waits for its last bucket and
    # the dense optimizer steps. Autograd calls it once the gradients of all lookups have arrived. The results are not views,
    # so that the model may change them in place.

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, take: Callable[[list[Tensor | None]], None], rows: Tensor, *places: Tensor) -> Any:
        ctx.take = take
        ctx.set_materialize_grads(False)
        return tuple(rows.index_select(0, each) for each in places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.take(list(gradients))
        return (None,) * (3 + len(gradients))
