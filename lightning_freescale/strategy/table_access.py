"""What users do with sharded tables between steps, whichever loop trains them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lightning_freescale.embeddings.shards import ShardedTables


class TableAccess:
    """For strategies with sharded tables.

    Attributes:
        tables: the sharded tables; None if the module has none.
    """

    tables: ShardedTables | None

    def drain(self) -> None:
        """Wait until every update of the steps so far is in the tables: before reading them by hand, on every rank."""
        raise NotImplementedError

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
