"""Does "freescale" train models as good as those one has without it? HSTU and SASRec of examples/, both ways, seed by seed.

*plain* is what a user has without us, on the same samples in every step: HSTU under TorchRec's own exchange and DDP, SASRec, a
plain ``nn.Embedding``, under "ddp", the ranks' losses weighed by hand; samples as drawn. *freescale* is our defaults: balanced,
overlapped, deduplicated; SASRec with ``shard=["items"]``. Two gloo ranks; a seed decides weights, order, dropout and negatives.

Leave-one-out: of each user the last item is for test, the one before for validation, the model is trained on the rest for a
number of epochs that is fixed beforehand. Ranked is the held-out item among all items but those that the user has seen before
it, ties against it; for SASRec also among 100 that the user has never seen, drawn uniformly, the same in all runs.

The loss curves are of fits without dropout, and with the same negatives on all ranks: the loss over the global batch of every
step, freescale's against plain's. Such fits differ in nothing but the order of summation, and training amplifies that; by how
much is measured beside it by a control: plain once more, the samples of each step on other ranks.

``--wire bfloat16`` sends the rows and gradients of *freescale* as 16 bits, ``--wire bfloat16 float32`` the rows only. The rows
of the test are rounded as well.

``python benchmarks/convergence.py --data ml-1m.seqs.npz``: any file of histories in time order, with arrays ``items`` and
``offsets`` (user u owns ``items[offsets[u]:offsets[u + 1]]``) and ``users``, their ids; ml-latest-small by default. HSTU reads
times, and without them places. How each model is trained is RECIPES, in convergence_models.py; options change it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
import numpy as np
from convergence_models import ELSEWHERE, FREESCALE, MODELS, PLAIN, Recipe, losses_of, recipe_of, scores_of

from lightning_freescale.testing import run_distributed

LONGEST_FIT_S = 6 * 3600.0
_Found = TypeVar("_Found")


def main(words: Sequence[str] | None = None) -> None:
    options = _options(words)
    figures: dict[str, float] = {}
    for model in options.models:
        changed = {name: getattr(options, name) for name in ("epochs", "samples", "max_length")}
        changed["wire"] = dict(zip(("rows", "gradients"), options.wire * 2))
        recipe = replace(
            recipe_of(model, options.data), **{name: value for name, value in changed.items() if value is not None}
        )
        print(f"{model}: {recipe}", flush=True)
        if options.steps:
            figures |= _curves(model, recipe, options)
        if recipe.epochs:
            figures |= _scores(model, recipe, options)
    harness.finish(figures, options)


def _scores(model: str, recipe: Recipe, options: argparse.Namespace) -> dict[str, float]:
    """Train every seed both ways."""
    found: dict[str, list[dict[str, float]]] = {PLAIN: [], FREESCALE: []}
    for seed in options.seeds:
        for way, scores in found.items():
            scores.append(_on_two_ranks(scores_of, model, recipe, options.data, way, seed))
            print(f"{model}, {way}, seed {seed}:", *(f"{name} {score:.4f}" for name, score in scores[-1].items()), flush=True)
    figures = {f"{model}_{name}": figure for name, figure in summarize(found[PLAIN], found[FREESCALE]).items()}
    for name in found[PLAIN][0]:
        for way in found:
            mean, deviation = (figures[f"{model}_{way}_{name}{ending}"] for ending in ("", "_deviation"))
            print(f"{model}, {way}: {name} {mean:.4f} +- {deviation:.4f}")
        apart, paired = (figures[f"{model}_{name}_difference{ending}"] for ending in ("", "_deviation"))
        units = figures[f"{model}_{name}_difference_in_deviations"]
        print(f"{model}: {name} differs by {apart:+.4f}, per seed +- {paired:.4f}; {units:.2f} deviations", flush=True)
    return figures


def summarize(plain: list[dict[str, float]], freescale: list[dict[str, float]]) -> dict[str, float]:
    """Return mean and standard deviation over the seeds, of both and of their differences, seed by seed, for each score.

    ``..._difference_in_deviations`` is how far the means are apart, in standard deviations of the plain runs.
    """
    figures = {}
    for name in plain[0]:
        ours, theirs = (np.array([scores[name] for scores in runs]) for runs in (freescale, plain))
        for ending, values in (
            (f"{PLAIN}_{name}", theirs),
            (f"{FREESCALE}_{name}", ours),
            (f"{name}_difference", ours - theirs),
        ):
            figures |= {ending: float(values.mean()), f"{ending}_deviation": float(values.std(ddof=1))}
        apart, deviation = abs(figures[f"{name}_difference"]), figures[f"{PLAIN}_{name}_deviation"]
        figures[f"{name}_difference_in_deviations"] = apart / deviation if deviation else (np.inf if apart else 0.0)
    return figures


def _curves(model: str, recipe: Recipe, options: argparse.Namespace) -> dict[str, float]:
    """Compare the losses of the first steps, seed by seed; the figures are the largest of any seed."""
    figures: dict[str, float] = {}
    for seed in options.seeds:
        plain, *others = (
            _on_two_ranks(losses_of, model, recipe, options.data, way, seed, options.steps)
            for way in (PLAIN, FREESCALE, ELSEWHERE)
        )
        for way, losses in zip((FREESCALE, ELSEWHERE), others):
            found = differences(plain, losses)
            print(f"{model}, {way} against plain, seed {seed}:", *(f"{n} {d:.1e}" for n, d in found.items()), flush=True)
            for name, value in found.items():
                name = f"{model}_{way}_{name}"
                figures[name] = max(figures.get(name, 0.0), value)
    return figures


def differences(plain: list[float], other: list[float]) -> dict[str, float]:
    """Return the largest absolute and relative difference of two loss curves, and the latter also of their beginnings."""
    absolute = np.abs(np.subtract(plain, other))
    relative = absolute / np.abs(plain)
    so_far = {f"curve_relative_within_{steps}": float(relative[:steps].max()) for steps in (1, 10, 50, 100)}
    return {"curve_absolute": float(absolute.max()), "curve_relative": float(relative.max()), **so_far}


def _on_two_ranks(fit: Callable[..., _Found], *arguments: Any) -> _Found:
    return run_distributed(fit, 2, *arguments, timeout=LONGEST_FIT_S)[0]


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, help="an .npz of histories (default: ml-latest-small)")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="two or more seeds")
    parser.add_argument("--steps", type=int, default=200, help="steps of the loss curves; 0 for none (default: 200)")
    parser.add_argument("--epochs", type=int, help="epochs of each training; 0 for the loss curves alone")
    parser.add_argument("--samples", type=int, help="histories per rank and step")
    parser.add_argument("--max-length", type=int, help="largest number of items of a history")
    types = ("float32", "bfloat16", "float16")
    parser.add_argument("--wire", nargs="+", choices=types, default=["float32"], help="type of rows, and of gradients if other")
    options = parser.parse_args(words)
    if len(set(options.seeds)) < 2 and options.epochs != 0:
        parser.error(f"--seeds {options.seeds}: one run has no standard deviation, give two different ones or more")
    return options


if __name__ == "__main__":
    main()
