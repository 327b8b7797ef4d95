"""How the ids of the next batch come to be known, of every overlapped collection; and when nobody knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchrec import KeyedJaggedTensor

from lightning_freescale._lightning.loops import rank_zero_info, rank_zero_warn
from lightning_freescale.embeddings.lookahead.probe import IdsFunction, LookaheadMode, ModeProposal, Probe
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.strategy.validation import has_embedding_ids

Ids = dict[str, list[KeyedJaggedTensor]]
"""By the path of their collection, of each lookup."""


class Lookahead:
    """Asks the user's function, and the places in the batch where ids stood before, for the ids of the batch that comes next.

    Args:
        engine: the engine; its collections are asked for.
        module: whose method ``embedding_ids`` tells ids, if ``ids_of`` does not.
        ids_of: the user's function that tells the ids in a batch.
        strategy: name of the strategy's class, for errors and warnings.

    Attributes:
        agreed_modes: the highest mode that any rank proposed in the step before, by collection.
        function: what tells the ids; None if nothing does.
    """

    def __init__(
        self,
        engine: OverlapEngine,
        module: Any,
        ids_of: Callable[[Any], Any] | None = None,
        strategy: str = "FreeScaleStrategy",
    ) -> None:
        self._engine, self._module, self._ids_of, self._strategy = engine, module, ids_of, strategy
        self._probes = {path: Probe() for path in engine.modules}
        self.agreed_modes: dict[str, int] = {}
        self._told: Ids = {}  # of what comes next
        self._asked = False
        self._noticed: set[str] = set()
        self.function = self._ids_function()
        tell_plain(engine.plain)

    def proposals(self) -> dict[str, ModeProposal]:
        """Return how this rank comes to know ids, by collection."""
        return {path: probe.proposal for path, probe in self._probes.items()}

    def start_batch(self) -> None:
        """Note that another batch computes, so that another one comes next."""
        self._asked = False

    def tell(self, loaded: Any) -> Ids:
        """Return the ids that the user tells of a batch that is to come, as it comes out of the loader."""
        probing = any(self._probes[path].mode == LookaheadMode.PROBE for path in self._engine.modules)
        return {} if self.function is None or not probing else self.function(loaded)

    @property
    def asked(self) -> bool:
        """Whether the ids of the batch that comes next have been asked for: once, also where a closure runs a step again."""
        return self._asked

    def known_ids(self, told: Ids, batch: Any) -> Ids:
        """Return the ids of the batch that comes next, which the user has ``told`` or which stand in ``batch``."""
        self._asked, self._told, found = True, told, {}
        for path, probe in self._probes.items():
            if self.function is not None and path in told:
                ids = probe.told(told[path], self.function.name)
            else:
                ids = probe.ids_of(batch)
            if ids is not None:
                found[path] = [features.to(self._engine.tables.device, non_blocking=True) for features in ids]
        return found

    def learn(self, batch: Any, comes_ahead: bool = True) -> None:
        """Learn from what the model has looked up in a step on ``batch``, on the device.

        Args:
            batch: as the step got it.
            comes_ahead: whether batches are known before their step, so that it matters where ids stand in them.
        """
        for path, lookups in self._engine.lookups().items():
            probe, features = self._probes[path], [lookup.features for lookup in lookups]
            if lookups[0].predicted is not None:
                probe.report(all(lookup.predicted for lookup in lookups), batch, features)
            elif not probe.known and comes_ahead and (self.function is None or (self._asked and path not in self._told)):
                probe.learn(batch, features)
        for path, mode in self.agreed_modes.items():
            self._probes[path].follow_agreed_mode(mode)

    def end_forward(self) -> None:
        """Submit the modes that the lookups of the step led to, and say once of which collections nobody knows the ids."""
        self._engine.submit_next_ids({}, {path: probe.mode for path, probe in self._probes.items()})
        self._engine.end_forward()
        self._give_notice()

    def give_up(self, reason: str) -> None:
        """Stop trying, for all collections."""
        for probe in self._probes.values():
            probe.give_up(reason)

    def _give_notice(self) -> None:
        """Warn once of the collections whose ids cannot be known; on rank 0, which hears of it from the others."""
        silent = [
            path for path, probe in self._probes.items() if probe.mode == LookaheadMode.NONE and path not in self._noticed
        ]
        if not silent:
            return
        self._noticed.update(silent)
        why = "; ".join(f"{path!r}: {self._probes[path].reason}" for path in silent)
        rank_zero_warn(
            f"the next batch's ids cannot be known ahead ({why}): the exchange of these embedding collections is not "
            "overlapped with compute from here on. Put the KeyedJaggedTensor into the batch as the model looks it up, or an "
            f"nn.Embedding's tensor of ids; or tell the ids by {self._strategy}(ids_of=...) or a method embedding_ids(batch) "
            f"of the {'LightningModule' if self._strategy == 'FreeScaleStrategy' else 'module'}"
        )

    def _ids_function(self) -> IdsFunction | None:
        """Return what the user has given the strategy, or else the module's method; None if there is neither."""
        ids_of, engine = self._ids_of, self._engine
        name = f"{self._strategy}(ids_of={getattr(ids_of, '__qualname__', type(ids_of).__name__)})"
        if ids_of is None and has_embedding_ids(self._module):
            ids_of, name = self._module.embedding_ids, f"{type(self._module).__name__}.embedding_ids"
        embeddings = [collection.path for collection, _ in engine.tables.modules if collection.embedding]
        return None if ids_of is None else IdsFunction(ids_of, name, engine.modules, engine.plain, embeddings)


def tell_plain(reasons: Mapping[str, str]) -> None:
    """Say of which collections the exchange is TorchRec's, and why."""
    for path, reason in reasons.items():
        rank_zero_info(f"strategy 'freescale': the exchange of {path!r} is not overlapped with compute: {reason}")
