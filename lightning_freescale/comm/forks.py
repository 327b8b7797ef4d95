"""What a forked process, as a worker of a DataLoader is, must leave alone of what it has inherited."""

from __future__ import annotations

import gc
import os


def leave_groups_alone() -> None:
    """From now on no forked process of this one collects garbage that it has inherited.

    A model that is no longer used, and with it the process groups of its tables, waits for the garbage collector. A worker that
    would collect them waits for threads that fork has not copied: it hangs in gloo's destructor, or dies of a segmentation
    fault.
    """
    os.register_at_fork(after_in_child=gc.freeze)
