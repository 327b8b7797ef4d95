"""Cross-entropy over all items in chunks, compared with the cross-entropy of all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_freescale import losses
from lightning_freescale.losses import catalogue_cross_entropy

ITEMS, DIM = 37, 8


def _given(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (5, 4)) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*of, generator=draw, dtype=dtype) for of in ((*shape, DIM), (ITEMS, DIM), (ITEMS,)))
    targets = torch.randint(0, ITEMS, shape, generator=draw)
    targets.view(-1)[1::3] = -100
    return *(each.requires_grad_() for each in (hidden, weight, bias)), targets


def _whole(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float, **options: Any) -> Tensor:
    logits = F.linear(hidden, weight, bias) / temperature
    found = F.cross_entropy(logits.reshape(-1, ITEMS), targets.reshape(-1), **options)
    return found.view(targets.shape) if options["reduction"] == "none" else found


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("smoothing", "temperature", "with_bias"), [(0.0, 1.0, False), (0.0, 0.3, True), (0.2, 2.0, True)])
@pytest.mark.parametrize(("chunk", "kept"), [("auto", True), (3, True), (3, False), (100, False)])
def test_loss_and_gradients_are_those_of_all_logits(
    reduction: Any, smoothing: float, temperature: float, with_bias: bool, chunk: Any, kept: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(losses, "_KEPT_LOGITS", 10**9 if kept else 0)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "temperature": temperature}
    found = []
    for ours in (True, False):
        hidden, weight, bias, targets = _given()
        given = bias if with_bias else None
        if ours:
            loss = catalogue_cross_entropy(hidden, weight, targets, given, chunk=chunk, **options)
        else:
            loss = _whole(hidden, weight, targets, given, **options)
        loss.backward(torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape))
        found.append([loss.detach(), hidden.grad, weight.grad, bias.grad])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class _Largest(TorchDispatchMode):
    """A mode that records the largest number of elements that an operation has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(each.numel() for each in (made,) if isinstance(each, Tensor))])
        return made


def test_no_more_logits_than_a_chunk_exist_at_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(losses, "_KEPT_LOGITS", 0)
    hidden, weight, _, targets = _given(shape=(64, 50))
    with _Largest() as whole:
        _whole(hidden, weight, targets, None, 1.0, reduction="mean").backward()
    with _Largest() as seen:
        loss = catalogue_cross_entropy(hidden, weight, targets, chunk=100)
        kept = loss.grad_fn.next_functions[0][0].kept
        loss.backward()
    assert kept is None, "the chunks together are all logits"
    assert whole.numel == 3200 * ITEMS and seen.numel <= max(hidden.numel(), 100 * ITEMS)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    hidden, weight, _, targets = _given()
    hidden.requires_grad_(frozen not in ("hidden", "both"))
    weight.requires_grad_(frozen not in ("weight", "both"))
    loss = catalogue_cross_entropy(hidden, weight, targets)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
        assert (hidden.grad is None, weight.grad is None) == (frozen == "hidden", frozen == "weight")
    with torch.no_grad():
        torch.testing.assert_close(catalogue_cross_entropy(hidden, weight, targets), loss.detach())


def test_a_second_backward_is_as_the_first() -> None:
    hidden, weight, _, targets = _given()
    loss = catalogue_cross_entropy(hidden, weight, targets, chunk=3)
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, [hidden, weight])):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_positions_that_do_not_count() -> None:
    hidden, weight, _, targets = _given()
    ignored = torch.full_like(targets, 7)
    assert catalogue_cross_entropy(hidden, weight, ignored, ignore_index=7).isnan(), "as torch's mean of nothing"
    loss = catalogue_cross_entropy(hidden, weight, ignored, ignore_index=7, reduction="sum")
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("chunk", ["auto", 3])
def test_under_autocast_products_are_short_and_sums_are_not(chunk: Any) -> None:
    found = []
    for ours in (True, False):
        hidden, weight, _, targets = _given(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            if ours:
                loss = catalogue_cross_entropy(hidden, weight, targets, chunk=chunk)
            else:
                loss = _whole(hidden, weight, targets, None, 1.0, reduction="mean")
        loss.backward()
        assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
        found.append([loss.detach(), hidden.grad, weight.grad])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    exact = _whole(
        *(each.double() if each.is_floating_point() else each for each in (hidden, weight)),
        targets,
        None,
        1.0,
        reduction="mean",
    )
    torch.testing.assert_close(found[0][0].double(), exact, rtol=5e-3, atol=0.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden": torch.ones(2, 3)}, "hidden of shape"),
        ({"targets": torch.ones(3, dtype=torch.int64)}, "targets of shape"),
        ({"targets": torch.ones(2)}, "int64"),
        ({"bias": torch.ones(2)}, "bias of shape"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ({"reduction": "average"}, "reduction='average'"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"chunk": 0}, "chunk=0"),
    ],
)
def test_the_error_names_the_argument(change: dict[str, Any], named: str) -> None:
    given = {"hidden": torch.ones(2, DIM), "table": torch.ones(ITEMS, DIM), "targets": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=named):
        catalogue_cross_entropy(**{**given, **change})


@pytest.mark.parametrize("target", [-1, ITEMS])
def test_a_target_beyond_the_rows_is_refused(target: int) -> None:
    with pytest.raises(IndexError, match=f"rows 0 to {ITEMS - 1}"):
        catalogue_cross_entropy(torch.ones(1, DIM), torch.ones(ITEMS, DIM), torch.tensor([target]))
