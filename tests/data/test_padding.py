"""Detection of padding from the shapes of the first batches."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torchrec import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.data.padding import BatchShapes, detect_padding, shapes_of

Samples = list[Tensor]
STEPS, RANKS = 6, 2


class Named(NamedTuple):
    items: Any
    label: Any


@dataclasses.dataclass
class Record:
    items: Any
    label: Any


class Plain:
    def __init__(self, items: Any, label: Any) -> None:
        self.items, self.label = items, label


def draw(seed: int, shortest: int = 3, longest: int = 60, samples: int | None = None) -> Samples:
    """Return mostly short histories of a batch; the number of samples differs between batches."""
    rng = np.random.default_rng(seed)
    samples = samples or int(rng.integers(5, 12))
    lengths = shortest + (rng.random(samples) ** 2 * (longest - shortest)).astype(int)
    return [torch.from_numpy(rng.integers(1, 1000, length)) for length in lengths]


def padded(samples: Samples, **options: Any) -> Tensor:
    return pad_sequence(samples, batch_first=True, **options)


def fixed(samples: Samples, length: int, left: bool = False) -> Tensor:
    whole = [*cut(samples, length), torch.zeros(length, dtype=torch.int64)]
    return padded(whole, padding_side="left" if left else "right")[:-1]


def cut(samples: Samples, most: int) -> Samples:
    return [items[-most:] for items in samples]


def shifted(samples: Samples) -> dict[str, Samples]:
    return {"inputs": [items[:-1] for items in samples], "targets": [items[1:] for items in samples]}


def with_token(samples: Samples) -> Samples:
    return [torch.cat([items[:1], items]) for items in samples]


def label(samples: Samples) -> Tensor:
    return torch.ones(len(samples))


def lengths(samples: Samples) -> Tensor:
    return torch.tensor([len(items) for items in samples])


def keyed(samples: Samples, *others: Samples, offsets: bool = False) -> KeyedJaggedTensor:
    counts = torch.cat([lengths(each) for each in (samples, *others)])
    values = torch.cat([items for each in (samples, *others) for items in each])
    jagged = {"offsets": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])} if offsets else {"lengths": counts}
    return KeyedJaggedTensor([f"feature {index}" for index in range(1 + len(others))], values, **jagged)


def floats(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(*shape: int) -> Tensor:
    return torch.randint(1, 1000, shape, generator=torch.Generator().manual_seed(sum(shape)))


def rounded(samples: Samples, multiple: int) -> Tensor:
    rows = padded(samples)
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % multiple))


JAGGED: dict[str, Callable[[Samples], Any]] = {
    "values and lengths": lambda s: {"values": torch.cat(s), "lengths": lengths(s)},
    "tuple of values and offsets": lambda s: (torch.cat(s), lengths(s).cumsum(0), label(s)),
    "values of numpy": lambda s: {"values": torch.cat(s).numpy(), "label": label(s).numpy()},
    "values with width": lambda s: [floats(int(lengths(s).sum()), 4), lengths(s)],
    "packed in one row": lambda s: {"input_ids": torch.cat(s)[None], "position_ids": torch.cat(s)[None]},
    "values shifted": lambda s: Record({name: torch.cat(part) for name, part in shifted(s).items()}, label(s)),
    "values with a token": lambda s: Named(torch.cat(with_token(s)), label(s)),
    "values cut at 20": lambda s: {"values": torch.cat(cut(s, 20)), "label": label(s)},
    "values cut at 20 and shifted": lambda s: {name: torch.cat(part) for name, part in shifted(cut(s, 20)).items()},
    "values cut at 4": lambda s: torch.cat(cut(s, 4)),
    "keyed": keyed,
    "keyed by offsets": lambda s: Plain(keyed(s, offsets=True), label(s)),
    "keyed in a tuple": lambda s: (keyed(s), label(s)),
    "keyed with features as long": lambda s: {"features": keyed(s, s, s)},
    "keyed with others": lambda s: {"features": keyed([items[:1] for items in s], s, [items[:1] for items in s])},
    "keyed beside dense features": lambda s: {"features": keyed(s), "dense": floats(len(s), 16), "label": label(s)},
    "keyed beside images": lambda s: Record({"features": keyed(s), "image": floats(len(s), 3, 8, 8)}, label(s)),
    "keyed beside candidates": lambda s: {"features": keyed(s), "candidates": ids(len(s), 100), "user": ids(len(s))},
    "keyed beside multi-hot targets": lambda s: (keyed(s), torch.nn.functional.one_hot(ids(len(s)), 1000)),
    "jagged tensor": lambda s: {"items": JaggedTensor(torch.cat(s), lengths=lengths(s)), "label": label(s)},
    "nested tensor": lambda s: {"items": torch.nested.nested_tensor(s, layout=torch.jagged), "label": label(s)},
    "strided nested tensor": lambda s: (torch.nested.as_nested_tensor(s), label(s)),
    "packed sequence": lambda s: {"items": pack_sequence(s, enforce_sorted=False), "label": label(s)},
    "list of tensors": lambda s: s,
    "list of arrays": lambda s: {"items": [items.numpy() for items in s], "label": label(s)},
    "list of dicts": lambda s: [{"items": items, "embedding": floats(16), "label": torch.ones(())} for items in s],
    "tuple of lists": lambda s: tuple(map(list, zip(*[(part[:-1], part[1:]) for part in s]))),
}

BATCH: dict[str, Callable[[Samples], Any]] = {
    "dict": lambda s: {"items": padded(s), "lengths": lengths(s)},
    "tuple": lambda s: (padded(s), label(s)),
    "data class": lambda s: Record(padded(s), label(s)),
    "named tuple": lambda s: Named(padded(s), label(s)),
    "plain object": lambda s: Plain({"inputs": [padded(s)]}, label(s)),
    "mapping": lambda s: UserDict(input_ids=padded(s), attention_mask=padded(s) > 0),
    "tensor alone": padded,
    "numpy": lambda s: {"items": padded(s).numpy(), "label": label(s).numpy()},
    "left": lambda s: (padded(s, padding_side="left"), label(s)),
    "time first": lambda s: (pad_sequence(s), label(s)),
    "time first with width": lambda s: pad_sequence([items[:, None].float().repeat(1, 8) for items in s]),
    "channels first": lambda s: padded(s).float()[:, None].repeat(1, 8, 1),
    "shifted": lambda s: {name: padded(part, padding_value=-100) for name, part in shifted(s).items()},
    "with a token": lambda s: {"items": padded(with_token(s))},
    "stacked with targets": lambda s: {"ids": torch.stack([padded(s), padded(s), padded(s) * 2])},
    "negatives": lambda s: {"items": padded(s), "negatives": ids(len(s), max(map(len, s)), 5)},
    "embedded features": lambda s: {"features": floats(len(s), max(map(len, s)), 8), "user": ids(len(s))},
    "times beside users": lambda s: {"user": ids(len(s)), "times": padded(s).float()},
    "mask of bool beside keyed": lambda s: {"features": keyed(s), "mask": padded(s) > 0},
    "beside values": lambda s: {"items": padded(s), "targets": torch.cat(s)},
    "beside features": lambda s: (padded(s), floats(len(s), 16), floats(len(s), 3, 8, 8), ids(len(s), 100), label(s)),
    "rounded up to 8": lambda s: {"input_ids": rounded(s, 8), "label": label(s)},
    "cut at 50, which some reach": lambda s: {"items": padded(cut(s, 50)), "label": label(s)},
    "cut at 50 and shifted": lambda s: {name: padded(part) for name, part in shifted(cut(s, 50)).items()},
}

FIXED: dict[str, tuple[int, Callable[[Samples], Any]]] = {
    "at 50": (50, lambda s: (fixed(s, 50), label(s))),
    "at 200": (200, lambda s: {"items": fixed(s, 200), "label": label(s)}),
    "at 200 on the left": (200, lambda s: Record(fixed(s, 200, left=True), label(s))),
    "at 50 of numpy": (50, lambda s: [fixed(s, 50).numpy(), label(s).numpy()]),
    "time first": (64, lambda s: (fixed(s, 64).T, label(s))),
    "inputs and targets": (50, lambda s: {"items": fixed(s, 50), "inputs": fixed(s, 50)[:, :-1]}),
    "stacked with targets": (50, lambda s: torch.stack([fixed(s, 50), fixed(s, 50), fixed(s, 50)])),
    "negatives": (50, lambda s: Named(fixed(s, 50), ids(len(s), 50, 3))),
    "times and embedded features": (
        70,
        lambda s: {"t": fixed(s, 70).float(), "x": fixed(s, 70)[..., None].float() * floats(8)},
    ),
    "half precision": (70, lambda s: {"times": (fixed(s, 70) > 0).bfloat16()}),
    "mask beside keyed": (64, lambda s: {"features": keyed(s), "mask": fixed(s, 64) > 0}),
    "beside features": (50, lambda s: (fixed(s, 50), floats(len(s), 16), floats(len(s), 3, 8, 8), ids(len(s), 16), label(s))),
    "beside candidates": (50, lambda s: {"items": fixed(s, 50), "candidates": ids(len(s), 100), "user": ids(len(s))}),
    "cut at 20, which all reach": (20, lambda s: {"items": padded(cut(s, 20)), "label": label(s)}),
    "values that repeat": (80, lambda s: {"items": torch.stack([items.repeat(80)[:80] for items in s])}),
}

UNKNOWN: dict[str, Callable[[Samples], Any]] = {
    "labels": lambda s: {"user": ids(len(s)), "label": label(s), "lengths": lengths(s)},
    "dense features": lambda s: (floats(len(s), 16), floats(len(s), 64), floats(len(s), 3, 8, 8)),
    "integer features": lambda s: {"profile": ids(len(s), 16), "label": label(s)},
    "integers of two lengths": lambda s: {"items": ids(len(s), 100), "candidates": ids(len(s), 200)},
    "matrix of samples": lambda s: floats(len(s), len(s)),
    "random crops": lambda s: {"values": torch.cat([items[: 1 + int(items[0]) % len(items)] for items in s])},
    "random crops beside candidates": lambda s: (
        torch.cat([items[: 1 + int(items[0]) % len(items)] for items in s]),
        ids(len(s), 16),
    ),
    "numbers of Python": lambda s: [items.tolist() for items in s],
    "nothing": lambda s: None,
}

CASES = [
    *(pytest.param(collate, "none", None, id=f"jagged: {name}") for name, collate in JAGGED.items()),
    *(pytest.param(collate, "batch", None, id=f"batch: {name}") for name, collate in BATCH.items()),
    *(pytest.param(collate, "fixed", length, id=f"fixed: {name}") for name, (length, collate) in FIXED.items()),
    *(pytest.param(collate, None, None, id=f"unknown: {name}") for name, collate in UNKNOWN.items()),
]


def observed(collate: Callable[[Samples], Any], seed: int = 0, **sizes: Any) -> list[list[BatchShapes]]:
    batches = [[draw(seed + RANKS * step + rank, **sizes) for rank in range(RANKS)] for step in range(STEPS)]
    return [[shapes_of(collate(samples), lengths(samples)) for samples in step] for step in batches]


def verdict(steps: list[list[BatchShapes]]) -> tuple[Any, Any]:
    return detect_padding([shapes for batches in steps for shapes in batches])


@pytest.mark.parametrize(("collate", "padding", "length"), CASES)
def test_formats(collate: Callable[[Samples], Any], padding: str | None, length: int | None) -> None:
    for seed in (0, 1000, 2000):
        steps = observed(collate, seed)
        for until in range(STEPS):
            assert verdict(steps[:until])[0] in (None, padding), "a verdict before the last step is no other one"
        assert verdict(steps) == verdict([batches[::-1] for batches in steps]) == verdict(steps[::-1]) == (padding, length)


@pytest.mark.parametrize("collate", [padded, keyed, torch.cat, lambda s: s, lambda s: fixed(s, 12)])
def test_equally_long_samples_tell_nothing(collate: Callable[[Samples], Any]) -> None:
    assert verdict(observed(collate, shortest=12, longest=12)) == (None, None)
    assert verdict(observed(collate, shortest=12, longest=12, samples=12)) == (None, None)


@pytest.mark.parametrize(("length", "found"), [(400, "fixed"), (128, None)])
def test_samples_of_nearly_one_length_far_below_the_padded_length_tell(length: int, found: str | None) -> None:
    """Leave a length undecided if rounding to a multiple also explains it."""
    drawn = [draw(step, shortest=60, longest=62) for step in range(STEPS)]
    steps = [[shapes_of({"items": fixed(s, length), "label": torch.zeros(len(s), 300)}, lengths(s))] for s in drawn]
    assert verdict(steps) == (found, length if found else None)


def test_batches_of_one_sample() -> None:
    assert verdict(observed(padded, samples=1)) == (None, None), "padded or concatenated, they are the same"
    assert verdict(observed(lambda s: fixed(s, 80), samples=1)) == ("fixed", 80)
    few = [*observed(padded, samples=1), *observed(padded, seed=50)[:2]]
    assert verdict(few) == ("batch", None)


def test_one_coincidence_does_not_decide() -> None:
    samples = [*draw(0, longest=10, samples=9), torch.arange(10)]
    for batch in (padded(samples), torch.cat(samples), keyed(samples), ids(10, 10), fixed(samples, 20)):
        assert verdict([[shapes_of(batch, lengths(samples))]]) == (None, None)


def test_lengths_that_already_are_cut_leave_padded_batches_open() -> None:
    samples = [cut(draw(seed, samples=40), 15) for seed in range(12)]
    assert verdict([[shapes_of(padded(s), lengths(s)) for s in samples]]) == (None, None)
    assert verdict([[shapes_of(torch.cat(s), lengths(s)) for s in samples]]) == ("none", None)


def test_a_shorter_batch_shows_that_a_fixed_length_was_the_cap() -> None:
    steps = observed(lambda s: padded(cut(s, 20)))
    assert verdict(steps) == ("fixed", 20)
    short = [draw(seed, longest=15) for seed in (90, 91)]
    assert verdict([*steps, [shapes_of(padded(s), lengths(s)) for s in short]]) == ("batch", None)


def test_shapes_are_values_that_ranks_exchange() -> None:
    samples = draw(0)
    batch = {"features": keyed(samples, samples), "items": padded(samples), "dense": floats(len(samples), 16)}
    before = dict(batch["features"].__dict__)
    shapes = shapes_of(batch, lengths(samples).numpy())
    assert batch["features"].__dict__ == before, "TorchRec would keep in the batch what it computes"
    n, longest, total = len(samples), max(map(len, samples)), sum(map(len, samples))
    assert (shapes.samples, shapes.longest, sum(shapes.lengths)) == (n, longest, total)
    assert {shape for _, _, shape in shapes.tensors} == {(2 * total,), (total,), (n, longest), (n, 16)}
    assert pickle.loads(pickle.dumps(shapes)) == shapes
    with io.BytesIO() as file:
        torch.save(dataclasses.astuple(shapes), file)
        file.seek(0)
        assert BatchShapes(*torch.load(file, weights_only=True)) == shapes, "as gather_objects exchanges them"


def test_empty_batches_and_wrong_lengths() -> None:
    empty = shapes_of({"items": torch.zeros(0, 5, dtype=torch.int64)}, [])
    assert (empty.samples, empty.longest) == (0, 0)
    assert verdict([[empty], []]) == (None, None)
    assert verdict([[empty], *observed(padded)]) == ("batch", None)
    for wrong in ([[1, 2]], [1.5], [-1], 3):
        with pytest.raises(ValueError, match="lengths="):
            shapes_of({}, wrong)
