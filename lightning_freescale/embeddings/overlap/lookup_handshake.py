"""Lookups that every rank has to know of: requests, rows that other ranks request, and the errors of any rank."""

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
    """The result of a lookup outside of steps, in which each rank looks up one module or none."""

    modules: list[int]  # number of the module that each rank looks up, from 1 on; 0 for none
    rows: Tensor  # rows of this rank's lookup, shape [rows, dim]
    places: Tensor  # index into rows for each id, shape [ids]
    error: ValueError | None = None  # of the ids of any rank


class LookupHandshake:
    """Exchanges requests and raises the errors of one rank on all ranks."""

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
        """Return the message for the next batch. Wrong ids count as unknown, because the model may never look them up."""
        state, request = known.state, self._route.no_rows
        if state == NextIds.REQUESTED:
            try:
                request = self.request(known.lookups)
            except ValueError:
                state = NextIds.UNKNOWN
        return IdsToSend(state, request, known.gives_up)

    def ask_for(self, lookups: Sequence[KeyedJaggedTensor], kind: LookedUp) -> tuple[LookedUp, RowRequest, ValueError | None]:
        """Return ``kind``, or WRONG for wrong ids, with the request and the error of lookups that were not submitted."""
        try:
            return kind, self.request(lookups), None
        except ValueError as error:
            return LookedUp.WRONG, self._route.no_rows, error.with_traceback(None)  # no reference cycle through this frame

    def fetch_more(self, lookups: Sequence[KeyedJaggedTensor], updates: bool, given: SomeRows) -> tuple[Tensor, Tensor]:
        """Fetch the rows of lookups in a step that were not submitted, and serve those of other ranks.

        ``given`` are the rows whose gradients other ranks may send in the same message. Return the rows, and the index of the
        row of each id.
        """
        kind, request, wrong = self.ask_for(lookups, LookedUp.MORE)
        heads, incoming, _ = self._route.exchange_ids(
            IdsToSend(NextIds.ANNOUNCED, request), updates, kind, given, self.no_values
        )
        self.raise_errors(heads, wrong)
        return self._serve_more(heads, incoming, request), request.inverse

    def evaluate(self, module: int, features: KeyedJaggedTensor | None) -> EvaluatedRows:
        """Fetch the rows of a lookup outside of steps, and serve those of other ranks. Collective.

        Args:
            module: the number of the module that this rank looks up, from 1 on; 0 for none.
            features: its ids; None if this rank looks up nothing in this collection.
        """
        kind, request, wrong = self.ask_for([] if features is None else [features], LookedUp.MORE)
        sent, nothing = IdsToSend(NextIds.EVALUATING, request, evaluated=module), self._route.nothing_given
        heads, incoming, _ = self._route.exchange_ids(sent, False, kind, nothing, self.no_values)
        modules, rows = [head.evaluated for head in heads], self.no_values
        try:
            self.raise_errors(heads, wrong)
        except ValueError as error:  # raised on all ranks, so they stay in step
            return EvaluatedRows(modules, rows, request.inverse, error.with_traceback(None))
        if any(head.most_ids for head in heads):
            rows = self._serve_more(heads, incoming, request)
        return EvaluatedRows(modules, rows, request.inverse)

    def exchange_until_served(
        self, sent: IdsToSend, updates: bool, lookup: LookedUp, given: SomeRows, gradients: Tensor
    ) -> tuple[list[Head], IncomingRows, Tensor]:
        """Repeat a message until no rank sends a request for more rows of the current batch in its place."""
        while True:
            heads, incoming, came = self._route.exchange_ids(sent, updates, lookup, given, gradients)
            self.raise_errors(heads)
            if all(head.lookup != LookedUp.MORE for head in heads):
                return heads, incoming, came
            self._serve_more(heads, incoming, self._route.no_rows)

    def _serve_more(self, heads: Sequence[Head], incoming: IncomingRows, request: RowRequest) -> Tensor:
        """Serve the ranks that request more rows; return the rows of this rank's request."""
        wanted = self._route.no_incoming.replaced(incoming, [head.lookup == LookedUp.MORE for head in heads])
        return self._route.give_rows(RequestedRows(request, wanted))

    def raise_errors(self, heads: Sequence[Head], wrong: Exception | None = None) -> None:
        """Raise the errors of any rank's lookup of the current batch on every rank. Collective if there are any.

        Raises:
            ValueError: the ids of a rank are wrong.
            RuntimeError: the ranks are out of step.
        """
        self._refuse_other_places(heads)
        if LookedUp.WRONG in {head.lookup for head in heads}:
            texts = gather_objects(str(wrong) if wrong else None, self.group)
            found = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
            raise ValueError(f"Embedding collection {self.path!r}, {'; '.join(found)}") from wrong

    def _refuse_other_places(self, heads: Sequence[Head]) -> None:
        draining = [rank for rank, head in enumerate(heads) if head.state == NextIds.DRAINING]
        if 0 < len(draining) < len(heads):
            raise RuntimeError(
                f"Ranks {draining} apply pending updates to the tables (they evaluate, save, or call state_dict()). The other "
                "ranks go on training. Do this on every rank."
            )
        evaluating = [rank for rank, head in enumerate(heads) if head.state == NextIds.EVALUATING]
        if 0 < len(evaluating) < len(heads):
            raise RuntimeError(
                f"Ranks {evaluating} look up rows outside of a training step. The other ranks train or save. Evaluate on "
                "every rank. If ranks evaluate different numbers of batches, do it inside `with strategy.evaluation():`. In a "
                "loop of your own, call engine.serve_evaluation() afterwards."
            )
        if len({head.number for head in heads}) > 1:
            numbers = [head.number for head in heads]
            raise RuntimeError(f"The ranks are out of step: they send messages {numbers}. Run the same loop on every rank.")
        steps = [rank for rank, head in enumerate(heads) if head.updates]
        if 0 < len(steps) < len(heads):
            raise ValueError(
                f"After this batch, ranks {steps} take an optimizer step and the other ranks accumulate gradients. Use the "
                "same number of batches and the same accumulate_grad_batches on every rank."
            )
