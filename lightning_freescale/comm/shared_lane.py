"""One process group for the tables of all models of a process.

The number of connections does not grow with the number of models.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.comm.options import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.process_group import BACKEND, ProcessGroupFreeScale

_Lanes = dict[tuple[ProcessGroupFreeScaleOptions, timedelta], list[ProcessGroupFreeScale]]
_lanes: MutableMapping[Any, _Lanes] = WeakKeyDictionary()
"""Lists of at most one group by their options, for each default group."""


def shared_lane(options: ProcessGroupFreeScaleOptions, timeout: timedelta) -> ProcessGroupFreeScale:
    """Return the process group of all ranks with these options, which stays open between fits. Collective.

    If any rank has no such group, or if messages of a failed run may be left in it, a new group takes its place.
    """
    shared = _lanes.setdefault(dist.group.WORLD, {}).setdefault((options, timeout), [])
    if all(gather_objects(any(lane.is_open and not lane.interrupted for lane in shared))):
        return shared[0]
    made = cast("ProcessGroupFreeScale", dist.new_group(backend=BACKEND, timeout=timeout, pg_options=options))
    earlier, shared[:] = [*shared], [made]
    # all successive groups share this list: if each referred to the next one, the first would keep all later groups alive
    made.current = shared
    for lane in earlier:
        discard_group(lane)
    return made


def current_lane(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group that has replaced ``group``, or ``group`` itself."""
    return group.current[0] if isinstance(group, ProcessGroupFreeScale) and group.current else group


def distrust_lanes() -> None:
    """Replace all shared groups before the next fit, because messages of a failed run may be left in them."""
    for lanes in _lanes.values():
        for shared in lanes.values():
            for lane in shared:
                lane.interrupted = True


def discard_group(group: dist.ProcessGroup) -> None:
    """Abort a group and remove it from torch's registries, without waiting for other ranks."""
    group.abort()
    dist.destroy_process_group(group)
