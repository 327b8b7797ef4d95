"""Advice on the causes of bubbles in a run of Lightning's Trainer, in terms of the settings of that run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_freescale.profiling.reporting.verdict import PARTED, Document, settled_options

_OTHER_COMMUNICATION = (
    "shows the callers; self.log(sync_dist=True) and metrics are all_reduces, and on_step=False reduces their number"
)
_SHARDED_WEIGHTS = (
    "Sharded weights are gathered in each step: prefetch them, shard over fewer ranks, or train with 'ddp' if they fit"
)
_HOST_OVERHEAD = {
    "loop, before the batch": "callbacks after the profiler, loggers and progress bars; a larger log_every_n_steps",
    "hooks before forward": "on_train_batch_start and on_before_batch_transfer, of the model and of callbacks",
    "between forward and backward": "the code after the loss: on_before_zero_grad, on_before_backward",
    "between backward and optimizer": "on_after_backward, gradient clipping, on_before_optimizer_step",
    "between optimizers": "the hooks between the optimizers' steps",
    "hooks after the step": (
        "on_train_batch_end, of the model and of callbacks, learning rate schedulers, and logging; a larger log_every_n_steps"
    ),
}
"""The code that runs in each section of host overhead."""
_SEE_DEVICE = "See what else runs on that device"
_PAD_TO_LONGEST = "A collate_fn that pads to the longest sample of the batch computes less padding"
_NO_PADDING = "Jagged attention computes no padding"


def advise(cause: str, about: str, document: Document) -> str | None:
    """Return what to do about a cause; None without advice that is specific to the Trainer.

    ``about`` is the exchange or the section of host overhead that costs most, and ``document`` is the report.
    """
    return _ADVICE[cause](about, document) if cause in _ADVICE else None


def _data_loading(about: str, document: Document) -> str:
    workers = document["run"].get("num_workers")
    advice = "num_workers=2 or more (of FreeScaleDataModule or DataLoader) loads batches in parallel with compute"
    if workers:
        advice = f"Use more workers than num_workers={workers} if there are free cores"
    return f"{advice}; or reduce the work in __getitem__ and collate_fn"


def _first(document: Document, *choices: tuple[str, str]) -> str:
    """Return the first advice whose options, separated by spaces, are neither on in the run nor rejected by it.

    The last choice has no option, so that it always applies.
    """
    settled = settled_options(document)
    return next(advice for options, advice in choices if settled.isdisjoint(options.split()))


def _calls(document: Document) -> str:
    return _first(document, ("torch_profiler_steps", "BubbleProfiler(torch_profiler_steps=3)"), ("", "trace.json"))


def _to_balance(document: Document) -> str:
    run, plan = document["run"], document["run"].get("assignment")
    if plan is None:
        return (
            "FreeScaleDataModule(train_set, lengths=..., collate_fn=...) instead of your DataLoader assigns samples so that "
            "ranks finish together"
        )
    if plan == "as drawn":
        return "Remove balance=False: FreeScaleDataModule then assigns samples so that ranks finish together"
    predicted = document["summary"].get("predicted_imbalance")
    if predicted is not None and predicted < document["summary"]["compute_imbalance"] - PARTED:
        fit = "freescale balance fit makes a cost model from this run's report.json"
        later = "After the first epoch, plans follow the measured times. If the difference stays, pass a function as cost="
        return _first(document, ("cost", fit), ("", later))
    larger = "Try larger batches or truncated histories: freescale balance simulate predicts the imbalance"
    if plan != "fixed":
        return larger
    weighed = "BalanceOptions(assignment_mode='slack')" if run["strategy"] == "freescale" else "Trainer(strategy='freescale')"
    return _first(document, ("assignment_mode", f"{weighed} allows unequal numbers of samples on the ranks"), ("", larger))


def _slow_hardware(about: str, document: Document) -> str:
    if document["imbalance"]["method"] == "cost model":
        return _SEE_DEVICE
    shows = "BubbleProfiler(lengths_fn=...) shows whether that rank has longer histories. If not, see what runs on its device"
    return _first(document, ("lengths", shows), ("", _SEE_DEVICE))


def _uneven_compute(about: str, document: Document) -> str | None:
    if (document["imbalance"] or {}).get("method") != "cost model":
        shows = "BubbleProfiler(lengths_fn=...) or FreeScaleDataModule(train_set, lengths=...) shows whether histories cause it"
        return _first(document, ("lengths", shows), ("", "")) or None
    is_padded = (document["summary"].get("padding") or {}).get("kind") == "batch"
    return _unplanned_padding(document) if is_padded else None


def _embedding_exchange(about: str, document: Document) -> str:
    run = document["run"]
    if run["strategy"] != "freescale":
        return "Trainer(strategy='freescale') exchanges rows while the model computes"
    if run.get("overlap") == "off":
        return (
            "Replace overlap=False or overlap='torchrec' by overlap=True: FreeScaleStrategy then exchanges rows during compute"
        )
    if run.get("overlap") != "on":
        return (
            "See the notice at the beginning of the fit: it names the reason why this exchange is not overlapped, and the fix"
        )
    measures = "FreeScaleStrategy(target_bubble_reduction=0.9) measures whether a split backward hides more"
    parts = "FreeScaleDataModule(micro_batches='auto') measures whether micro-batches hide more"
    return "Overlap is on, but compute is too short for it: " + _first(
        document,
        ("split_backward target_bubble_reduction", measures),
        ("micro_batches", f"{parts}. The loss must not compare the samples of a batch"),
        ("wire", "FreeScaleStrategy(wire='bfloat16') halves the bytes. It rounds the rows, so results change"),
        ("", "a larger batch or a faster network hides more"),
    )


def _dense_communication(about: str, document: Document) -> str:
    if about == "buffers":
        return "DDPStrategy(broadcast_buffers=False), if no rank changes the buffers differently"
    if about != "dense gradients":
        return _SHARDED_WEIGHTS
    run = document["run"]
    less = "accumulate_grad_batches= sends gradients less often; " * (run["accumulate_grad_batches"] == 1)
    return f"{less}a larger batch hides more" + "; large embedding tables should be sharded" * (not run.get("sharded_tables"))


def _host_overhead(about: str, document: Document) -> str:
    code = _HOST_OVERHEAD.get(about, "hooks and callbacks")
    return f"Reduce the work in {code}; {_calls(document)} shows the calls"


def _padding(about: str, document: Document) -> str:
    kind = document["summary"]["padding"]["kind"]
    if kind != "batch, planned":
        return _PAD_TO_LONGEST if kind == "fixed" else _unplanned_padding(document)
    if document["run"]["strategy"] != "freescale":  # which divides batches
        return _NO_PADDING
    # 'auto' chooses 1 if an exchange is not overlapped
    parts = "'auto'" if document["run"].get("overlap") in ("on", None) else "2"
    separately = f"FreeScaleDataModule(micro_batches={parts}) pads each micro-batch separately"
    return _first(document, ("micro_batches", f"{separately}; {_NO_PADDING.lower()}"), ("", _NO_PADDING))


def _unplanned_padding(document: Document) -> str:
    run, options = document["run"], settled_options(document)
    plans = {"as drawn": "balance=False", "zigzag": "assignment_mode='zigzag'"}
    hinder = [plans[run["assignment"]]] if run.get("assignment") in plans else []
    hinder += ["batch_tokens="] * ("batch_tokens" in options)
    if hinder:
        return f"Remove {' and '.join(hinder)}: samples of similar length then form the batch of a rank, with less padding"
    if run["strategy"] != "freescale":
        return "Trainer(strategy='freescale') detects the padding and puts samples of similar length together"
    return _NO_PADDING


def _nothing(about: str, document: Document) -> str | None:
    profiled = "torch_profiler_steps" in settled_options(document) or document["device_idle"] is not None
    if document["run"]["device"] == "cpu" or profiled:
        return None
    return (
        "BubbleProfiler(torch_profiler_steps=3) shows whether the device is idle during compute because it waits for the host. "
        "Otherwise use a faster device, a smaller model, or more samples per rank"
    )


_ADVICE: Mapping[str, Callable[[str, Document], str | None]] = {
    "data loading": _data_loading,
    "imbalance of data": lambda about, document: _to_balance(document) + (f". {_SEE_DEVICE}" if about == "slow ranks" else ""),
    "slow hardware": _slow_hardware,
    "uneven compute": _uneven_compute,
    "embedding exchange": _embedding_exchange,
    "dense communication": _dense_communication,
    "other communication": lambda about, document: f"{_calls(document)} {_OTHER_COMMUNICATION}",
    "host overhead": _host_overhead,
    "padding": _padding,
    "nothing": _nothing,
}
