"""The form of rows and gradients in messages: each is a whole number of words of 4 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Wire: TypeAlias = str | Mapping[str, str]
"""The value of the option ``wire``: the type of all values, or the types of ``"rows"`` and ``"gradients"``."""

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KINDS = ("rows", "gradients")


@dataclass(frozen=True)
class RowCodec:
    """Converts values of shape ``[rows, dim]`` to words of shape ``[rows, words]``, and back to float32.

    Words have the dtype float32, but other code only copies them. They contain values of ``dtype``. Values that it cannot
    represent are rounded to the nearest one that it can, at most to its largest finite value; NaN remains NaN. TorchRec's
    quantized communication rounds in the same way.
    """

    dim: int
    dtype: torch.dtype

    @cached_property
    def words(self) -> int:
        """The number of words per row. An odd number of 16-bit values is padded by one."""
        return -(-self.dim * self.dtype.itemsize // 4)

    def encode(self, values: Tensor) -> Tensor:
        if self.dtype == torch.float32:
            return values
        if values.dtype != self.dtype:
            limits = torch.finfo(self.dtype)
            values = values.clamp(limits.min, limits.max).to(self.dtype)
        return (F.pad(values, (0, 1)) if self.dim % 2 else values).view(torch.float32)

    def decode(self, words: Tensor) -> Tensor:
        return words if self.dtype == torch.float32 else words.view(self.dtype)[:, : self.dim].float()


@dataclass(frozen=True)
class WireFormat:
    """The codecs of one collection."""

    rows: RowCodec
    gradients: RowCodec

    @classmethod
    def of_tables(cls, dim: int, dtype: torch.dtype = torch.float32, wire: Wire = "float32") -> WireFormat:
        """Return the format for tables of width ``dim``. Rows of 16-bit tables are sent as they are."""
        rows, gradients = wire_types(wire)
        return cls(RowCodec(dim, rows if dtype == torch.float32 else dtype), RowCodec(dim, gradients))


def wire_types(wire: Wire) -> tuple[torch.dtype, torch.dtype]:
    """Return the types of rows and gradients for a value of the option ``wire``, or raise a ValueError."""
    given = {**dict.fromkeys(_KINDS, "float32"), **wire} if isinstance(wire, Mapping) else dict.fromkeys(_KINDS, wire)
    if len(given) > len(_KINDS) or not all(isinstance(each, str) and each in _TYPES for each in given.values()):
        raise ValueError(
            f"wire={wire!r} is unknown. Pass one of {', '.join(map(repr, _TYPES))}, or a dict with one of them for 'rows' and "
            "for 'gradients'."
        )
    rows, gradients = (_TYPES[given[kind]] for kind in _KINDS)
    return rows, gradients
