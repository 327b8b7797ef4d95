"""docs/communication.md: both blocks on two ranks."""

import torch
import torch.distributed as dist

from lightning_freescale.testing import run_distributed
from tests.docs.excerpts import Excerpts


def exchange() -> tuple[list[float], list[float]]:
    """Return the numbers received by ``all_to_all_single`` and by ``exchange``: two from each rank."""
    page, mine = Excerpts("docs/communication.md"), torch.full((4,), float(dist.get_rank()))
    names = {"input": mine, "output": torch.empty(4), "output_sizes": [2, 2], "input_sizes": [2, 2]}
    page.python(names)
    names |= {"send": mine, "received": torch.empty(4), "gets": [2, 2], "gives": [2, 2]}
    page.python(names)
    if dist.get_rank() == 0:
        page.end()
    return names["output"].tolist(), names["received"].tolist()


if __name__ == "__main__":
    for rank in run_distributed(exchange, 2):
        assert rank == ([0, 0, 1, 1], [0, 0, 1, 1])
