"""A simulator of the training step on any number of ranks.

``Network``, ``TrainingLoad`` and ``Catalogue`` consist of ``Quantity`` objects, each with a range and a source. ``Techniques``
are the techniques in use. ``step_times`` computes the times of steps, and ``simulate`` their intervals.
"""

from lightning_freescale.simulator.catalogue import Catalogue
from lightning_freescale.simulator.network import Network
from lightning_freescale.simulator.outlook import Outlook, simulate
from lightning_freescale.simulator.quantity import Quantity
from lightning_freescale.simulator.training_step import StepTraffic, Techniques, TrainingLoad, step_times

__all__ = ["Catalogue", "Network", "Outlook", "Quantity", "StepTraffic", "Techniques", "TrainingLoad", "simulate", "step_times"]
