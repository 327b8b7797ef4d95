"""Advice on the causes of bubbles in a run of Lightning's Trainer, in terms of the settings of that run."""

from __future__ import annotations

from typing import NamedTuple

from lightning_freescale.profiling.reporting.verdict import PARTED, Document


class _Advice(NamedTuple):
    """Advice for runs with all facts of ``needs`` and no fact of ``unless``, which are separated by semicolons."""

    text: str
    needs: str = ""
    unless: str = ""

    def fits(self, facts: set[str]) -> bool:
        needs, unless = (set(filter(None, names.split("; "))) for names in (self.needs, self.unless))
        return needs <= facts and unless.isdisjoint(facts)


_HOST_OVERHEAD = {
    "loop, before the batch": "callbacks after the profiler, loggers and progress bars; a larger log_every_n_steps",
    "hooks before forward": "on_train_batch_start and on_before_batch_transfer, of the model and of callbacks",
    "between forward and backward": "the code after the loss: on_before_zero_grad, on_before_backward",
    "between backward and optimizer": "on_after_backward, gradient clipping, on_before_optimizer_step",
    "between optimizers": "the hooks between the optimizers' steps",
    "hooks after the step": (
        "on_train_batch_end, of the model and of callbacks, learning rate schedulers, and logging; a larger log_every_n_steps"
    ),
    "embeddings: before the step": "reading the optimizers' options for the tables; fewer parameter groups of tables",
    "embeddings: ids of the next step": "the search for the next ids; simpler embedding_ids() or ids_of=, and smaller batches",
    "embeddings: gradients handed over": "passing on the gradients of lookups; fewer embedding collections",
    "embeddings: logging": "the log of the embedding exchange; a larger log_every_n_steps",
}
"""The code that runs in each section of host overhead."""
_LOAD_LESS = "or reduce the work in __getitem__ and collate_fn"
_SEE_DEVICE = "See what else runs on that device"
_SIMILAR = "samples of similar length then form the batch of a rank, with less padding"
_UNEQUAL = "allows unequal numbers of samples on the ranks"
_SEND_LESS = "accumulate_grad_batches= sends gradients less often; a larger batch hides more"
_NO_PADDING = "Jagged attention computes no padding"
_BUFFERS = "broadcast_buffers=False), if no rank changes the buffers differently"
_PARTS = "pads each micro-batch separately; jagged attention computes no padding"
_UNPLANNED = (
    _Advice(f"Remove balance=False: {_SIMILAR}", "padding batch; plan as drawn"),
    _Advice(f"Remove assignment_mode='zigzag': {_SIMILAR}", "padding batch; plan zigzag"),
    _Advice(f"Replace batch_tokens= by batch_size=: {_SIMILAR}", "padding batch; batch_tokens"),
    _Advice(f"Trainer(strategy='freescale') detects the padding: {_SIMILAR}", "padding batch", "freescale"),
    _Advice(_NO_PADDING, "padding batch"),
)
_ADVICE = {
    "data loading": (
        _Advice(f"Use more workers than num_workers={{num_workers}} if there are free cores; {_LOAD_LESS}", "workers"),
        _Advice(f"num_workers=2 or more (of FreeScaleDataModule or DataLoader) loads batches during compute; {_LOAD_LESS}"),
    ),
    "imbalance of data": (
        _Advice("FreeScaleDataModule(train_set, lengths=..., collate_fn=...) balances the ranks", "plan None"),
        _Advice("Remove balance=False: FreeScaleDataModule then balances the ranks", "plan as drawn"),
        _Advice("freescale balance fit makes a cost model from this run's report.json", "parted; lengths", "cost"),
        _Advice(
            "BubbleProfiler(lengths_fn=...) records the lengths for freescale balance fit, or change cost=", "parted", "cost"
        ),
        _Advice("After the first epoch, plans follow measured times. If they still differ, pass a function as cost=", "parted"),
        _Advice(f"BalanceOptions(assignment_mode='slack') {_UNEQUAL}", "plan fixed; freescale", "assignment_mode"),
        _Advice(f"Trainer(strategy='freescale') {_UNEQUAL}", "plan fixed", "freescale"),
        _Advice("Try larger batches or truncated histories: freescale simulate predicts the imbalance"),
    ),
    "slow hardware": (
        _Advice("BubbleProfiler(lengths_fn=...) shows whether that rank has longer histories", unless="costs; lengths"),
    ),
    "uneven compute": (
        _Advice("BubbleProfiler(lengths_fn=...) shows whether histories cause it", unless="costs; lengths"),
        *_UNPLANNED,
    ),
    "embedding exchange": (
        _Advice("Trainer(strategy='freescale') exchanges rows while the model computes", unless="freescale"),
        _Advice("Replace overlap=False or overlap='torchrec' by overlap=True, which sends rows during compute", "overlap off"),
        _Advice("See the notice at the beginning of the fit: it names the reason and the fix", unless="overlap on"),
        _Advice(
            "FreeScaleStrategy(target_bubble_reduction=0.9) measures whether a split backward hides more",
            unless="split_backward; target_bubble_reduction",
        ),
        _Advice("FreeScaleDataModule(micro_batches='auto') measures whether micro-batches hide more", unless="micro_batches"),
        _Advice("FreeScaleStrategy(wire='bfloat16') halves the bytes. It rounds the rows, so results change", unless="wire"),
        _Advice("Compute is too short for the exchange: a larger batch or a faster network hides more"),
    ),
    "dense communication": (
        _Advice(f"FreeScaleStrategy({_BUFFERS}", "buffers; freescale"),
        _Advice(f"DDPStrategy({_BUFFERS}", "buffers"),
        _Advice("Prefetch sharded weights, shard over fewer ranks, or train with 'ddp' if they fit", unless="dense gradients"),
        _Advice(f"{_SEND_LESS}; item tables should be sharded", unless="accumulates; sharded"),
        _Advice(_SEND_LESS, unless="accumulates"),
        _Advice("A larger batch hides more"),
    ),
    "other communication": (
        _Advice("{trace} shows the callers; self.log(sync_dist=True) and metrics are all_reduces, on_step=False makes fewer"),
    ),
    "host overhead": (_Advice("Reduce the work in {code}; {trace} shows the calls"),),
    "padding": (
        _Advice("A collate_fn that pads to the longest sample of the batch computes less padding", "padding fixed"),
        _Advice(
            f"FreeScaleDataModule(micro_batches='auto') {_PARTS}",
            "padding batch, planned; freescale",
            "micro_batches; overlap off; overlap impossible",  # for which 'auto' chooses 1
        ),
        _Advice(f"FreeScaleDataModule(micro_batches=2) {_PARTS}", "padding batch, planned; freescale", "micro_batches"),
        *_UNPLANNED,
        _Advice(_NO_PADDING),
    ),
    "nothing": (
        _Advice(
            "{trace} shows whether the device waits for the host. If not, use a faster device or more samples per rank",
            unless="cpu; torch_profiler_steps; device_idle",
        ),
    ),
}
"""The advice on each cause; the first one that fits applies."""


def advise(cause: str, about: str, document: Document) -> str | None:
    """Return what to do about a cause; None without advice that is specific to the Trainer.

    ``about`` is the exchange or the section of host overhead that costs most, and ``document`` is the report.
    """
    facts = _facts(about, document)
    found = next((advice.text for advice in _ADVICE.get(cause, ()) if advice.fits(facts)), None)
    if found is None:
        return None
    trace = "trace.json" if "torch_profiler_steps" in facts else "BubbleProfiler(torch_profiler_steps=3)"
    code = _HOST_OVERHEAD.get(about, "hooks and callbacks")
    text = found.format(trace=trace, code=code, num_workers=document["run"].get("num_workers"))
    return f"{text}. {_SEE_DEVICE}" if about == "slow ranks" else text


def _facts(about: str, document: Document) -> set[str]:
    run, summary = document["run"], document["summary"]
    padding, predicted = summary.get("padding") or {}, summary.get("predicted_imbalance")
    facts = {about, run["strategy"], run["device"], f"padding {padding.get('kind')}"}
    facts |= {f"plan {run.get('assignment')}", f"overlap {run.get('overlap')}"}
    facts |= {*run.get("options", ()), *run.get("rejected", ())}  # reports of earlier versions lack both
    checks = {
        "workers": run.get("num_workers"),
        "accumulates": run["accumulate_grad_batches"] > 1,
        "parted": predicted is not None and predicted < summary["compute_imbalance"] - PARTED,
        "device_idle": document["device_idle"] is not None,
        "sharded": run.get("sharded_tables"),
        "costs": (document["imbalance"] or {}).get("method") == "cost model",
    }
    return facts | {name for name, holds in checks.items() if holds}
