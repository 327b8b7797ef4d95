"""Leave-one-out samples from histories, and jagged batches from samples."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_freescale._torchrec import require_torchrec
from lightning_freescale.data.interactions import Histories

Split = Literal["train", "validate", "test", "predict"]
_HELD_OUT: dict[Split, int] = {"train": 2, "validate": 1, "test": 0, "predict": 0}


class HistoryDataset(Dataset[dict[str, Any]]):
    """One sample per user: the history up to a held-out item.

    The last item of a user is for ``"test"``, the one before for ``"validate"``; ``"train"`` predicts every next item of
    the rest; ``"predict"`` has the whole history and no target. Users with fewer than ``min_interactions`` have no
    training target and must have been left out. With ``max_length`` only the last so many items of a history go in.
    """

    min_interactions = 4

    def __init__(self, histories: Histories, users: NDArray[np.int64], split: Split, max_length: int | None = None) -> None:
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length={max_length!r}: pass a number of items, at least 1, or None for whole histories")
        self.histories, self.users, self.split, self.max_length = histories, users, split, max_length

    @property
    def lengths(self) -> NDArray[np.int64]:
        """History length of every sample, what its compute time depends on; shape ``[samples]``."""
        whole = self.histories.lengths[self.users] - _HELD_OUT[self.split] - (self.split != "predict")
        return whole if self.max_length is None else np.minimum(whole, self.max_length)

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``item`` and ``time`` of shape ``[length]``; ``target`` of shape ``[length]`` (train), ``[0]`` or ``[1]``.

        ``user`` is the source's id if that is an integer; of string ids their place in ``histories.user_ids``.
        """
        user = self.users[index]
        start, end = self.histories.offsets[user], self.histories.offsets[user + 1] - _HELD_OUT[self.split]
        if self.max_length is not None:
            start = max(start, end - self.max_length - (self.split != "predict"))
        items, times = self.histories.items[start:end], self.histories.times[start:end]
        last = len(items) - (self.split != "predict")
        target = items[1:] if self.split == "train" else items[last:]
        ids = self.histories.user_ids
        name = ids[user] if ids.dtype.kind == "i" else user
        return {"item": items[:last], "time": times[:last], "target": target, "user": name}


def collate_histories(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A jagged batch.

    Returns:
        ``features``, a KeyedJaggedTensor of feature ``"item"``; ``time``, int64 or float64 ``[total length]``, as
        ``Histories.times``; ``target``, int64, ``[total length]`` in training, ``[samples]`` in evaluation, empty in
        prediction; ``user``, int64 ``[samples]``, the source's ids, or of string ids their places in ``Histories.user_ids``.
    """
    require_torchrec()
    from torchrec import KeyedJaggedTensor

    lengths = torch.tensor([len(sample["item"]) for sample in samples], dtype=torch.int32)
    joined = {key: torch.from_numpy(np.concatenate([s[key] for s in samples])) for key in ("item", "time", "target")}
    return {
        # first: Lightning takes the size of the first tensor for the number of samples
        "user": torch.tensor([int(sample["user"]) for sample in samples]),
        "features": KeyedJaggedTensor(keys=["item"], values=joined["item"], lengths=lengths),
        "time": joined["time"],
        "target": joined["target"],
    }
