"""What a sharded module's forward does while the overlap engine has it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.overlap import errors
from lightning_freescale.embeddings.overlap.catalogue_table import CatalogueTable
from lightning_freescale.embeddings.overlap.collection import OverlappedCollection
from lightning_freescale.embeddings.overlap.evaluation import Evaluation
from lightning_freescale.embeddings.overlap.outputs import BagOutput, SequenceOutput, without_weights
from lightning_freescale.embeddings.shards import ShardedTables, refuse_whole_use


class ModuleForward:
    """Stands in for the forward of TorchRec's module while the engine has it; everything else of the module stays.

    Args:
        collection: what is sharded.
        module: TorchRec's sharded module.
        parts: its tables by width.
        evaluation: makes the lookups outside of steps.
        tables: all sharded tables.

    Attributes:
        collection: as given.
        parts: as given.
    """

    def __init__(
        self,
        collection: Collection,
        module: Any,
        parts: Sequence[OverlappedCollection],
        evaluation: Evaluation,
        tables: ShardedTables,
    ) -> None:
        self.collection, self.parts = collection, parts
        self._module = module
        output = BagOutput if collection.pooled else SequenceOutput
        self._output = output(collection, [part.layout for part in parts])
        self._evaluation = evaluation
        module.forward = self.forward
        self._catalogues: dict[str, CatalogueTable] = {}
        features = list(dict.fromkeys(feature for table in collection.tables for feature in table.features))
        for table in collection.tables:
            number = next(i for i, part in enumerate(parts) if table.name in {each.name for each in part.layout.tables})
            self._catalogues[table.key] = CatalogueTable(table, features, parts[number], self.rows, number, tables)
        for key, weight in self._weights():
            catalogue = weight.freescale_catalogue = self._catalogues[key]
            if catalogue.has_whole_rows:
                evaluation.tables.append(catalogue)
                weight.freescale_ranks = partial(evaluation.ranks, catalogue)
        self._state_dict_hook = module.register_state_dict_pre_hook(lambda *_: self.drain())
        # wrong ids are an error on every rank, which the ranks tell each other; several lookups are one update
        module.freescale_sharding.checks.enabled = False

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Return what the unsharded collection would."""
        return self._output(features, self.rows(self.ids_of(features)))

    def rows(self, ids: KeyedJaggedTensor) -> list[Tensor]:
        """Return the rows of a lookup by part, each of shape ``[ids, dim]`` in the order of its layout's features."""
        in_step = self.parts[0].jobs.open
        if not in_step:
            rows = self._evaluation.rows(self.collection.path, ids)
            if torch.is_grad_enabled():
                rows = [_refuse_gradient(each, self.collection.path) for each in rows]
        elif not torch.is_grad_enabled():
            rows = [part.rows_without_gradient(ids) for part in self.parts]
        elif torch._C._current_graph_task_id() != -1:  # in a backward: activation checkpointing computes something again
            rows = [part.rows_again(ids) for part in self.parts]
        else:
            noted = [part.note(ids) for part in self.parts]  # of all, before any waits: other ranks wait for what they look up
            rows = [part.rows(lookup) for part, lookup in zip(self.parts, noted)]
        return rows

    def ids_of(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return what of a lookup the other ranks have to know."""
        return without_weights(features)

    def drain(self) -> None:
        """Wait until every update of the steps before is in the tables. Collective between two steps."""
        for part in self.parts:
            part.drain()

    def sizes_of_losses(self) -> list[str]:
        """Return what losses over all rows of its tables send and hold."""
        return [text for catalogue in self._catalogues.values() if (text := catalogue.sizes_of_use())]

    def forget_copies(self) -> None:
        """Let go of copies of whole tables, because these change."""
        for catalogue in self._catalogues.values():
            catalogue.forget()

    def _weights(self) -> list[tuple[str, Any]]:
        held = self.collection.parameters(self._module)
        return [(key, held[key]) for key in self._catalogues]

    def close(self, farewell: bool) -> None:
        """Give TorchRec's forward back, and end the exchanges."""
        del self._module.forward
        for key, weight in self._weights():
            weight.freescale_catalogue = partial(refuse_whole_use, key)
            weight.freescale_ranks = None
        self._state_dict_hook.remove()
        self._module.freescale_sharding.checks.enabled = True
        for part in self.parts:
            part.close(farewell)


def _refuse_gradient(rows: Tensor, path: str) -> Tensor:
    """Return rows that were looked up outside of a step as part of a graph; their gradient is an error."""
    rows.requires_grad_().register_hook(lambda gradient: errors.update_outside_of_step(path))
    return rows.clone()
