"""The rows that this rank owns: reading them, and updating them with TorchRec's kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from torch import Tensor

from lightning_freescale._runtime.attributes import replaced
from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.optimizer import UpdateSettings, update_rows
from lightning_freescale.embeddings.overlap.row_codec import Wire, WireFormat
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.shards import ShardedTables, kernels, prepare_kernel

_ROW_BY_ROW = {"pooling_mode": PoolingMode.NONE}
"""The attribute of a kernel of bags with which it looks up single rows. FBGEMM passes the pooling mode in every call."""


@dataclass(frozen=True)
class LocalTable:
    """A table's rows on this rank."""

    index: int  # index of the table in the layout
    key: str
    first_row: int  # number of its first row here
    weight: Tensor  # live view, shape [rows, columns]; columns beyond the width of a row are padding


class TableKernel:
    """Tables that one FBGEMM kernel updates together.

    ``features`` has the table of each of the kernel's features. All tables are identified by their index in the layout.
    ``cached`` tells whether the newest values of rows may exist only in a cache of the GPU.
    """

    def __init__(self, module: Any, features: Sequence[int], tables: dict[int, LocalTable]) -> None:
        self.module, self.tables = module, tables
        self.cached = any(spec[2] == EmbeddingLocation.MANAGED_CACHING for spec in module.embedding_specs)
        self._feature_of = {index: features.index(index) for index in features}
        self._features = len(features)

    @torch.no_grad()
    def look_up(self, index: int, rows: Tensor) -> Tensor:
        """Return rows of a table by FBGEMM's lookup, which finds cached rows. Not tested on GPU."""
        counts = torch.zeros(self._features + 1, dtype=torch.int64)
        counts[self._feature_of[index] + 1] = len(rows)
        with replaced(self.module, _ROW_BY_ROW):
            return self.module(indices=rows, offsets=counts.cumsum(0).to(rows.device))

    def update(self, rows: dict[int, tuple[Tensor, Tensor]], settings: Sequence[UpdateSettings]) -> None:
        """Update the given rows, by table. Gradients of a row that occurs several times are summed in order.

        ``settings`` has those of all tables of the layout; FBGEMM has one setting for all tables of a kernel.
        """
        given = sorted((self._feature_of[index], index) for index in rows)
        counts = torch.zeros(self._features + 1, dtype=torch.int64)
        for feature, index in given:
            counts[feature + 1] = len(rows[index][0])
        ids = torch.cat([rows[index][0] - self.tables[index].first_row for _, index in given])
        gradients = torch.cat([rows[index][1] for _, index in given])
        prepare_kernel(self.module, {self.tables[index].key: settings[index] for index in rows})
        # without this, autograd runs the CUDA backwards of all threads on one thread: a model's backward that waits for this
        # update, as a state_dict() in a hook does, would wait forever
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False), replaced(self.module, _ROW_BY_ROW):
            self.module(indices=ids, offsets=counts.cumsum(0).to(ids.device)).backward(gradients)


class CpuKernel(TableKernel):
    """Tables on the CPU, updated by the operator of FBGEMM's backward without a forward."""

    # FBGEMM's operators for bags, here of one row each, are ten times as fast as those for rows, with the same bits. The
    # exception is row-wise Adagrad, where they omit the weight decay.
    _OPERATORS: ClassVar = {
        EmbOptimType.EXACT_SGD: ("backward_codegen_sgd", ()),
        EmbOptimType.EXACT_ADAGRAD: ("backward_codegen_adagrad", ("eps",)),
        EmbOptimType.EXACT_ROWWISE_ADAGRAD: (
            "nobag_backward_codegen_rowwise_adagrad",
            ("eps", "weight_decay", "weight_decay_mode", "max_norm"),
        ),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._by_rows = self.module.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD
        name, self._names = self._OPERATORS[self.module.optimizer]
        self._operator = getattr(torch.ops.fbgemm, f"split_embedding_{name}_cpu")
        self._rounding = self.module.optimizer_args.stochastic_rounding
        self._prepared: UpdateSettings | None = None
        self._arguments: list[Any] = []
        self._places = {
            index: self._place(feature, len(self.tables[index].weight)) for index, feature in self._feature_of.items()
        }

    def update(self, rows: dict[int, tuple[Tensor, Tensor]], settings: Sequence[UpdateSettings]) -> None:
        """Update the given rows, by table, with bitwise the results of :meth:`TableKernel.update`."""
        module = self.module
        for index, (numbers, gradients) in rows.items():
            if settings[index] is not self._prepared:  # a step has several updates
                self._prepared = settings[index]
                module.update_hyper_parameters(self._prepared.options)
                self._arguments = [getattr(module.optimizer_args, name) for name in self._names]
            first_row = self.tables[index].first_row
            self._update(index, numbers - first_row if first_row else numbers, gradients)

    def _update(self, index: int, ids: Tensor, gradients: Tensor) -> None:
        self._operate(self.module.weights_host.data, *self._places[index], ids, gradients)

    def _operate(self, weights: Tensor, place: Any, size: Tensor, state: Any, ids: Tensor, gradients: Tensor) -> None:
        width, bits = gradients.shape[1], self.module.total_hash_size_bits
        given: tuple[Any, ...]
        if self._by_rows:
            given = width, size, bits, ids, torch.tensor([0, ids.numel()])
        else:
            columns, offsets = torch.tensor([0, width], dtype=torch.int32), torch.arange(ids.numel() + 1)
            given = columns, width, size, bits, ids, offsets, PoolingMode.SUM, torch.empty(0)
        self._operator(
            *(gradients, weights, *place, *given, self._rounding),
            *(*state, self.module.learning_rate_tensor, *self._arguments),
        )

    def _place(self, feature: int, size: int) -> tuple[Any, Tensor, Any]:
        """Return the place of a feature's table in the kernel's memory, its size, and the place of its state."""
        module, here = self.module, slice(feature, feature + 1)
        place = module.weights_placements[here], module.weights_offsets[here]
        state: Any = ()
        if self.module.optimizer != EmbOptimType.EXACT_SGD:
            state = module.momentum1_host.data, module.momentum1_placements[here], module.momentum1_offsets[here]
        return place, torch.tensor([0, size]), state


class Bfloat16Kernel(CpuKernel):
    """Tables of bfloat16 on the CPU, where FBGEMM supports only float32 and float16: it updates float32 copies of rows."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        states = self.module.split_optimizer_states()
        self._states = dict(zip(self.tables, states)) if states else dict.fromkeys(self.tables, ())

    def _update(self, index: int, ids: Tensor, gradients: Tensor) -> None:
        rows, ids = torch.unique(ids, return_inverse=True)
        kept = [self.tables[index].weight.data, *self._states[index]]
        weights, *state = (each[rows].float() for each in kept)
        (placements, offsets), *_ = self._places[index]
        place = placements, torch.zeros_like(offsets)
        of_state = [part for each in state for part in (each.view(-1), *place)]
        self._operate(weights.view(-1), place, torch.tensor([0, len(rows)]), of_state, ids, gradients)
        for whole, part in zip(kept, (weights, *state)):
            whole[rows] = part.to(whole.dtype)


class AdamKernel(TableKernel):
    """Tables updated by Adam on the CPU, which FBGEMM does not support: its module only holds the rows.

    ``arguments`` are the optimizer's arguments by FBGEMM's names, for tables whose parameter group does not set them.
    """

    def __init__(self, states: dict[int, dict[str, Tensor]], arguments: Mapping[str, Any], *others: Any) -> None:
        super().__init__(*others)
        self._states, self._arguments = states, arguments

    def update(self, rows: dict[int, tuple[Tensor, Tensor]], settings: Sequence[UpdateSettings]) -> None:
        for index, (numbers, gradients) in rows.items():
            merged, sums = add_up(numbers - self.tables[index].first_row, gradients)
            arguments, step = {**self._arguments, **settings[index].options}, settings[index].step
            update_rows(self.tables[index].weight, self._states[index], merged, sums, arguments, step)


def add_up(rows: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct rows and the sums of their gradients in order: shapes ``[rows]`` and ``[rows, dim]``."""
    merged, inverse, counts = torch.unique(rows, return_inverse=True, return_counts=True)
    order = torch.argsort(inverse, stable=True)
    # index_add_ would add in any order on CUDA
    return merged, torch.embedding_bag(gradients, order, counts.cumsum(0) - counts)[0]


class LocalRows:
    """This rank's rows of a collection, by their number in the layout.

    ``clip_value`` is the limit of every element of a row's summed gradient in :meth:`update`; None for no limit. ``wire`` is
    the form of rows and gradients in messages.
    """

    def __init__(
        self,
        layout: RowLayout,
        rank: int,
        kernels: Sequence[TableKernel],
        dim: int,
        clip_value: float | None = None,
        wire: Wire = "float32",
    ) -> None:
        self.layout, self.kernels, self.dim = layout, list(kernels), dim
        self.wire = WireFormat.of_tables(dim, layout.tables[0].dtype, wire)
        self.clip_value = clip_value
        self._tables = [table for kernel in self.kernels for table in kernel.tables.values()]
        self._weights = [table.weight[:, :dim] for table in self._tables]
        self._cached = {index: kernel for kernel in self.kernels if kernel.cached for index in kernel.tables}
        self._first_rows = layout.first_row[rank].to(layout.device)
        self.rank = rank
        self.count = layout.rows_of(rank)

    @classmethod
    def from_module(
        cls,
        layout: RowLayout,
        collection: Collection,
        module: Any,
        tables: ShardedTables,
        clip_value: float | None = None,
        wire: Wire = "float32",
    ) -> LocalRows:
        """Return this rank's rows of the tables of ``collection``, all of one width and type, in TorchRec's ``module``."""
        rank = tables.group.rank()
        index_of = {(table.name, table.first_column): index for index, table in enumerate(collection.tables)}
        found: list[TableKernel] = []
        for kernel in kernels(module):
            specs = kernel._config.embedding_tables
            keys = [(spec.name, spec.local_metadata.shard_offsets[1]) for spec in specs]
            if keys[0] not in index_of:  # another part
                continue
            indices = [index_of[key] for key in keys]
            held = {}
            for index, weight in zip(indices, kernel.emb_module.split_embedding_weights()):
                held[index] = LocalTable(index, collection.tables[index].key, int(layout.first_row[rank, index]), weight)
            features = [index for index, spec in zip(indices, specs) for _ in spec.feature_names]
            optimizer = tables.optimizers[collection.tables[features[0]].key]
            arguments = (kernel.emb_module, features, held)
            if optimizer.sparse_adam:
                states = dict(zip(indices, kernel.sparse_adam_states))
                found.append(AdamKernel(states, optimizer.arguments, *arguments))
            elif tables.device.type == "cpu":
                found.append((Bfloat16Kernel if collection.tables[0].dtype == torch.bfloat16 else CpuKernel)(*arguments))
            else:
                found.append(TableKernel(*arguments))
        return cls(layout, rank, found, collection.tables[0].dim, clip_value, wire)

    def first_row(self, table: int) -> int:
        return int(self.layout.first_row[self.rank, table])

    def weight(self, table: int) -> Tensor:
        """Return a live view of a table's rows on this rank, shape ``[rows, dim]``. Raise if a GPU cache may be newer."""
        if table in self._cached:
            name = self.layout.tables[table].name
            raise ValueError(f"All rows of table {name!r} are needed, but it is cached on the GPU. Plan it in GPU memory.")
        found = [weight for held, weight in zip(self._tables, self._weights) if held.index == table]
        return found[0] if found else torch.empty(0, self.dim, device=self.layout.device)

    def places(self, table: int, ids: Tensor) -> Tensor:
        """Return the index of each id among this rank's rows of a table; outside of its range for rows of other ranks."""
        first = self.layout.starts[self.rank] + self.first_row(table)
        return self.layout.keys(table, ids) - first

    @torch.no_grad()
    def read(self, rows: Tensor) -> Tensor:
        """Return the current values of ``rows`` in the form of messages, shape ``[rows, words]``."""
        if len(self._tables) == 1:
            return self._read(0, rows)
        values = torch.empty(rows.numel(), self.wire.rows.words, device=rows.device)
        table_of_row = self._table_of(rows)
        for place, table in enumerate(self._tables):
            here = (table_of_row == table.index).nonzero().squeeze(1)
            if here.numel():
                values[here] = self._read(place, rows[here] - table.first_row)
        return values

    def _read(self, place: int, rows: Tensor) -> Tensor:
        index = self._tables[place].index
        if index in self._cached:
            found = self._cached[index].look_up(index, rows)[:, : self.dim].contiguous()  # it is sent as laid out in memory
        else:
            found = self._weights[place].index_select(0, rows)
        return self.wire.rows.encode(found)

    def update(self, rows: Tensor, gradients: Tensor, settings: Sequence[UpdateSettings]) -> None:
        """Do one optimizer step for ``rows``. A row that occurs several times gets the sum of its gradients, added in order.

        ``gradients`` have the shape ``[rows, dim]``, and ``settings`` the order of tables in the layout.
        """
        if not rows.numel():
            return
        if padding := self._tables[0].weight.shape[1] - self.dim:
            gradients = F.pad(gradients, (0, padding))
        by_table = self._by_table(rows, gradients)
        for kernel in self.kernels:
            given = {index: by_table[index] for index in kernel.tables if index in by_table and not settings[index].frozen}
            if self.clip_value is not None:
                given = {index: self._clamped(*each) if settings[index].clipped else each for index, each in given.items()}
            if given:
                kernel.update(given, settings)

    def clipped(self, rows: Tensor, settings: Sequence[UpdateSettings]) -> Tensor | slice:
        tables = [table.index for table in self._tables if settings[table.index].clipped]
        if len(tables) == len(self._tables):
            return slice(None)
        return torch.isin(self._table_of(rows), torch.tensor(tables, dtype=torch.int64, device=rows.device))

    def write_counts(self) -> list[int]:
        """Return torch's count of writes to each table.

        Updates by FBGEMM and by this package do not change a tensor's version, so any change is from other code.
        """
        return [table.weight._version for table in self._tables]

    def _clamped(self, rows: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        assert self.clip_value is not None
        rows, sums = add_up(rows, gradients)
        return rows, sums.clamp_(-self.clip_value, self.clip_value)

    def _by_table(self, rows: Tensor, gradients: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        if len(self._tables) == 1:
            return {self._tables[0].index: (rows, gradients)}
        table_of_row = self._table_of(rows)
        places = {table.index: (table_of_row == table.index).nonzero().squeeze(1) for table in self._tables}
        given = [(index, here) for index, here in places.items() if here.numel()]
        return {index: (rows.index_select(0, here), gradients.index_select(0, here)) for index, here in given}

    def _table_of(self, rows: Tensor) -> Tensor:
        # a table without rows here has the same first number as the next table: the last of them holds the row
        return torch.bucketize(rows, self._first_rows, right=True) - 1
