"""Advice on the causes of bubbles for a run of Lightning's Trainer: what to set, as this run would have to write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_freescale.profiling.reporting.verdict import PARTED, Document

_SENT_LESS = {
    "dense gradients": (
        "accumulate_grad_batches= sends gradients less often; a larger batch hides more; item tables belong into TorchRec"
    ),
    "buffers": "DDPStrategy(broadcast_buffers=False), if no rank changes them differently",
}
_SHARDED_WEIGHTS = (
    "Sharded weights are gathered in each step: prefetch them, shard over fewer ranks, or train under 'ddp' if they fit"
)
_RUNS_THERE = {
    "loop, before the batch": "callbacks behind the profiler, loggers and progress bars; a larger log_every_n_steps",
    "hooks before forward": "on_train_batch_start and on_before_batch_transfer, of the model and of callbacks",
    "between forward and backward": "what follows the loss: on_before_zero_grad, on_before_backward",
    "between backward and optimizer": "on_after_backward, gradient clipping, on_before_optimizer_step",
    "between optimizers": "the hooks between the optimizers' steps",
    "hooks after the step": (
        "on_train_batch_end, of the model and of callbacks, learning rate schedulers, and logging; a larger log_every_n_steps"
    ),
}
"""By section of host overhead."""
_SEE_DEVICE = "See what else runs on that device"
_PAD_TO_LONGEST = "A collate_fn that pads to the longest sample of the batch computes less padding"
_PLAN_PADDING = (
    "BalanceOptions(padding='auto') plans for batches that are padded to their longest sample; leave out balance=False, "
    "batch_tokens= and assignment_mode='zigzag'"
)


def advise(cause: str, about: str, document: Document) -> str | None:
    """Return what to do about a cause; None where there is nothing to say about a Trainer in particular.

    Args:
        cause: a cause of :class:`~lightning_freescale.profiling.reporting.verdict.BubbleVerdict`.
        about: the exchange or the section of host overhead that costs most.
        document: of the report.
    """
    return _ADVICE[cause](about, document) if cause in _ADVICE else None


def _data_loading(about: str, document: Document) -> str:
    workers = document["run"].get("num_workers")
    advice = "num_workers=2 or more (of FreeScaleDataModule or DataLoader) makes batches beside compute"
    if workers:
        advice = f"More workers than num_workers={workers}, where there are cores for them"
    return f"{advice}; or less work in __getitem__ and collate_fn"


def _imbalance_of_data(about: str, document: Document) -> str:
    balance = _to_balance(document)
    return f"{balance}. {_SEE_DEVICE}" if about == "slow ranks" else balance


def _to_balance(document: Document) -> str:
    plan = document["run"].get("assignment")
    if plan is None:
        return (
            "FreeScaleDataModule(train_set, lengths=..., collate_fn=...) in the place of your DataLoader assigns samples so "
            "that ranks finish together"
        )
    if plan == "as drawn":
        return "Take out balance=False: FreeScaleDataModule then assigns samples so that ranks finish together"
    predicted = document["summary"].get("predicted_imbalance")
    if predicted is not None and predicted < document["summary"]["compute_imbalance"] - PARTED:
        return "freescale balance fit makes a cost model of this run's report.json: the plan predicted less imbalance"
    if plan == "fixed":
        return (
            "BalanceOptions(assignment_mode='slack') lets ranks hold unequal numbers; the advice printed after epoch 0 has more"
        )
    return "The advice printed after the first epoch says what would help: larger batches, or truncated histories"


def _slow_hardware(about: str, document: Document) -> str:
    if document["imbalance"]["method"] == "cost model":
        return _SEE_DEVICE
    return f"BubbleProfiler(lengths_fn=...) tells whether it draws longer histories. If not: {_SEE_DEVICE}"


def _uneven_compute(about: str, document: Document) -> str | None:
    if (document["imbalance"] or {}).get("method") != "cost model":
        return "BubbleProfiler(lengths_fn=...), or FreeScaleDataModule(train_set, lengths=...), tells whether histories do it"
    return _PLAN_PADDING if (document["summary"].get("padding") or {}).get("kind") == "batch" else None


def _embedding_exchange(about: str, document: Document) -> str:
    run = document["run"]
    if run["strategy"] != "freescale":
        return "Trainer(strategy='freescale') exchanges rows while the model computes"
    if run.get("overlap") == "off":
        return "Take out overlap=False, or exchange='torchrec': FreeScaleStrategy then exchanges rows while the model computes"
    if run.get("overlap") == "on":
        return (
            "Overlap is on, and compute too short for it: FreeScaleStrategy(target_bubble_reduction=0.9) finds out whether "
            "micro-batches or a split backward hide more"
        )
    return "The notice at the beginning of the fit says why this exchange is not overlapped, and the way out"


def _dense_communication(about: str, document: Document) -> str:
    sharded = (
        "Sharded weights are gathered in each step: prefetch them, shard over fewer ranks, or train under 'ddp' if they fit"
    )
    return _SENT_LESS.get(about, sharded)


def _other_communication(about: str, document: Document) -> str:
    return (
        "BubbleProfiler(torch_profiler_steps=3) shows who calls it; self.log(sync_dist=True) and metrics are all_reduces, "
        "fewer with on_step=False"
    )


def _host_overhead(about: str, document: Document) -> str:
    where = _RUNS_THERE.get(about, "hooks and callbacks")
    return f"Less work in {where}; BubbleProfiler(torch_profiler_steps=3) shows the calls"


def _padding(about: str, document: Document) -> str:
    kind = document["summary"]["padding"]["kind"]
    if kind == "batch, planned":
        # 'auto' is settled to 1 where an exchange is not overlapped
        parts = "'auto'" if document["run"].get("overlap") in ("on", None) else "2"
        module = f"FreeScaleDataModule(micro_batches={parts})"
        return f"{module} pads each micro-batch by itself; jagged attention computes no padding"
    return _PAD_TO_LONGEST if kind == "fixed" else _PLAN_PADDING


def _nothing(about: str, document: Document) -> str | None:
    if document["run"]["device"] == "cpu" or document["device_idle"] is not None:
        return None
    return (
        "BubbleProfiler(torch_profiler_steps=3) shows whether the device is idle in compute and waits for the host. A faster "
        "device, a smaller model, or more samples per rank"
    )


_ADVICE: Mapping[str, Callable[[str, Document], str | None]] = {
    "data loading": _data_loading,
    "imbalance of data": _imbalance_of_data,
    "slow hardware": _slow_hardware,
    "uneven compute": _uneven_compute,
    "embedding exchange": _embedding_exchange,
    "dense communication": _dense_communication,
    "other communication": _other_communication,
    "host overhead": _host_overhead,
    "padding": _padding,
    "nothing": _nothing,
}
