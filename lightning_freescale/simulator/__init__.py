"""The training step of more ranks than there are, predicted: numpy alone, and the assignment is the caller's.

Knowledge goes one way: a ``Quantity`` says what is known and how, ``Network``, ``TrainingLoad`` and ``Catalogue`` are made of
quantities, ``Techniques`` chooses, ``step_times`` computes the steps, and ``simulate`` puts intervals around what comes out.
"""

from lightning_freescale.simulator.catalogue import Catalogue
from lightning_freescale.simulator.network import Network
from lightning_freescale.simulator.outlook import Outlook, simulate
from lightning_freescale.simulator.quantity import Quantity
from lightning_freescale.simulator.training_step import StepTraffic, Techniques, TrainingLoad, step_times

__all__ = ["Catalogue", "Network", "Outlook", "Quantity", "StepTraffic", "Techniques", "TrainingLoad", "simulate", "step_times"]
