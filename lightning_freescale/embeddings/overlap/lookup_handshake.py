"""Messages with a head between all ranks of a collection: requests, rows that other ranks ask for, and errors of any rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.embeddings.overlap.batch_state import RequestedRows, SomeRows
from lightning_freescale.embeddings.overlap.id_exchange import Head, IdsToSend, KnownIds, LookedUp, NextIds
from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.embeddings.overlap.proxy_route import ProxyRoute
from lightning_freescale.embeddings.overlap.routes import DirectRoute
from lightning_freescale.embeddings.overlap.row_requests import IncomingRows, RowRequest

Route: TypeAlias = DirectRoute | ProxyRoute


class EvaluatedRows(NamedTuple):
    """The result of a lookup outside of steps, in which every rank looks up one module or none.

    Attributes:
        modules: numbers of the modules that the ranks look up, from 1 on; 0 for none.
        rows: the rows of this rank's lookup, shape ``[rows, dim]``.
        places: which of them each id is, shape ``[ids]``.
        error: what is wrong with the ids of any rank; None if nothing is.
    """

    modules: list[int]
    rows: Tensor
    places: Tensor
    error: ValueError | None = None


class LookupHandshake:
    """Makes requests of ids, exchanges them, and turns the error of one rank into an error of all."""

    def __init__(self, path: str, group: dist.ProcessGroup, local: LocalRows, dedup: bool, route: Route) -> None:
        self.path, self.group = path, group
        self._layout, self._dedup, self._route = local.layout, dedup, route
        self.no_values = local.layout.starts.new_empty(0, local.dim, dtype=torch.float32)

    def request(self, lookups: Sequence[KeyedJaggedTensor]) -> RowRequest:
        """Return the rows that the lookups of a batch need.

        Raises:
            ValueError: the ids are wrong.
        """
        return RowRequest.from_lookups(lookups, self._layout, self._dedup)

    def ids_to_send(self, known: KnownIds) -> IdsToSend:
        """Return what to tell of a batch; ids that are wrong count as unknown: the model may never look them up."""
        state, request = known.state, self._route.no_rows
        if state == NextIds.REQUESTED:
            try:
                request = self.request(known.lookups)
            except ValueError:
                state = NextIds.UNKNOWN
        return IdsToSend(state, request, known.gives_up)

    def ask_for(self, lookups: Sequence[KeyedJaggedTensor], kind: LookedUp) -> tuple[LookedUp, RowRequest, ValueError | None]:
        """Return how to ask for lookups that were not submitted: ``kind``, or that they are wrong; the request; the error."""
        try:
            return kind, self.request(lookups), None
        except ValueError as error:
            return LookedUp.WRONG, self._route.no_rows, error.with_traceback(None)  # no circle through this frame

    def fetch_more(self, lookups: Sequence[KeyedJaggedTensor], updates: bool, given: SomeRows) -> tuple[Tensor, Tensor]:
        """Fetch the rows of lookups in a step that were not submitted, and serve those of other ranks.

        ``given`` are the rows whose gradients other ranks may be sending in the same message. Returns the rows, and which of
        them each id is.
        """
        kind, request, wrong = self.ask_for(lookups, LookedUp.MORE)
        heads, incoming, _ = self._route.exchange_ids(
            IdsToSend(NextIds.ANNOUNCED, request), updates, kind, given, self.no_values
        )
        self.raise_errors(heads, wrong)
        return self._serve_more(heads, incoming, request), request.inverse

    def evaluate(self, module: int, features: KeyedJaggedTensor | None) -> EvaluatedRows:
        """Fetch the rows of a lookup outside of steps, and serve those of the other ranks. Collective.

        Args:
            module: number of the module that this rank looks up, from 1 on; 0 for none.
            features: its ids; None if this rank looks up nothing of this collection.
        """
        kind, request, wrong = self.ask_for([] if features is None else [features], LookedUp.MORE)
        sent, nothing = IdsToSend(NextIds.EVALUATING, request, evaluated=module), self._route.nothing_given
        heads, incoming, _ = self._route.exchange_ids(sent, False, kind, nothing, self.no_values)
        modules, rows = [head.evaluated for head in heads], self.no_values
        try:
            self.raise_errors(heads, wrong)
        except ValueError as error:  # that of all ranks, which stay in step
            return EvaluatedRows(modules, rows, request.inverse, error.with_traceback(None))
        if any(head.most_ids for head in heads):
            rows = self._serve_more(heads, incoming, request)
        return EvaluatedRows(modules, rows, request.inverse)

    def exchange_until_served(
        self, sent: IdsToSend, updates: bool, lookup: LookedUp, given: SomeRows, gradients: Tensor
    ) -> tuple[list[Head], IncomingRows, Tensor]:
        """Exchange a message, again and again until no rank has had to ask for more rows of the current batch instead."""
        while True:
            heads, incoming, came = self._route.exchange_ids(sent, updates, lookup, given, gradients)
            self.raise_errors(heads)
            if all(head.lookup != LookedUp.MORE for head in heads):
                return heads, incoming, came
            self._serve_more(heads, incoming, self._route.no_rows)

    def _serve_more(self, heads: Sequence[Head], incoming: IncomingRows, request: RowRequest) -> Tensor:
        """Serve the ranks that have asked for more rows; return those of this rank's own request."""
        wanted = self._route.no_incoming.replaced(incoming, [head.lookup == LookedUp.MORE for head in heads])
        return self._route.give_rows(RequestedRows(request, wanted))

    def raise_errors(self, heads: Sequence[Head], wrong: Exception | None = None) -> None:
        """Raise what any rank's lookup of the current batch has got wrong, on every rank; collective if there is anything.

        Raises:
            ValueError: the ids of a rank are wrong.
            RuntimeError: the ranks are not in step.
        """
        self._refuse_other_places(heads)
        if LookedUp.WRONG in {head.lookup for head in heads}:
            texts = gather_objects(str(wrong) if wrong else None, self.group)
            found = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
            raise ValueError(f"embedding collection {self.path!r}, {'; '.join(found)}") from wrong

    def _refuse_other_places(self, heads: Sequence[Head]) -> None:
        draining = [rank for rank, head in enumerate(heads) if head.state == NextIds.DRAINING]
        if 0 < len(draining) < len(heads):
            raise RuntimeError(
                f"ranks {draining} bring the tables up to date (they evaluate, save, or call state_dict()), the others train "
                "on: do it on every rank"
            )
        evaluating = [rank for rank, head in enumerate(heads) if head.state == NextIds.EVALUATING]
        if 0 < len(evaluating) < len(heads):
            raise RuntimeError(
                f"ranks {evaluating} look up rows outside of a training step (they evaluate), the others train on or save: "
                "evaluate on every rank; if ranks evaluate different numbers of batches, do it inside `with "
                "strategy.evaluation():`, or call engine.serve_evaluation() after it in a loop of your own"
            )
        if len({head.number for head in heads}) > 1:
            raise RuntimeError(f"the ranks are not in step: they send messages {[head.number for head in heads]}")
        steps = [rank for rank, head in enumerate(heads) if head.updates]
        if 0 < len(steps) < len(heads):
            raise ValueError(
                f"after this batch ranks {steps} take an optimizer step, the others go on accumulating gradients: give every "
                "rank the same number of batches and the same accumulate_grad_batches"
            )
