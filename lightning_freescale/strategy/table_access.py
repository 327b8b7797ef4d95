"""What users do with sharded tables between steps, whichever loop trains them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lightning_freescale.embeddings.overlap import OverlapEngine
    from lightning_freescale.embeddings.shards import ShardedTables


class TableAccess:
    """For strategies with sharded tables.

    Attributes:
        tables: the sharded tables; None if the module has none.
        engine: exchanges their rows; None if TorchRec does.
    """

    tables: ShardedTables | None = None
    engine: OverlapEngine | None = None

    def drain(self) -> None:
        """Wait until every update of the steps so far is in the tables: before reading them by hand, on every rank."""
        if self.engine is not None:
            self.engine.drain()

    def writing_tables(self) -> AbstractContextManager[None]:
        """Enter this around writes to the tables by hand, on every rank.

        Updates under way come first, rows fetched ahead are void.
        """
        return nullcontext() if self.engine is None else self.engine.writing()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Enter this around lookups outside of training steps where ranks may make different numbers of them, on every rank.

        A rank that leaves it first gives the others their rows until all have left it. The Trainer's loops of validation, test
        and prediction need it not.
        """
        yield
        self.serve_evaluation()

    def serve_evaluation(self) -> None:
        """Give the other ranks the rows that they look up outside of steps, until every rank has called this method."""
        if self.engine is not None:
            self.engine.serve_evaluation()

    def full_weight(self, path: str) -> Tensor:
        """Return a copy of a whole sharded table on every rank, shape ``[rows, dim]``, without gradient. Collective.

        Updates under way are in it; later ones are not.

        Args:
            path: the table's name in the module's state dict, such as ``"item_emb"`` for an ``nn.Embedding`` or
                ``"net.items.embeddings.item"`` for a table of an EmbeddingCollection.

        Raises:
            ValueError: no sharded table has that name.
        """
        if self.tables is None:
            raise ValueError(f"full_weight({path!r}): the module has no sharded tables, read the parameter itself")
        self.drain()
        return self.tables.full_weight(path)
