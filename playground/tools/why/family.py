"""The processes of a run. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

from playground.base.process_status import process_status
from playground.world.rank.process import find_lifelines


def list_family(pid: int) -> Iterator[int]:
    """A process, and those that it has started: its fork server, too, which is no child of it, but
    ends with it."""
    children: dict[int, list[int]] = {}
    needing: dict[str, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (status := process_status(int(entry))):
            children.setdefault(int(status[1]), []).append(int(entry))
            for pipe in find_lifelines(int(entry))[1]:
                needing.setdefault(pipe, []).append(int(entry))
    family = [pid]
    for member in family:
        yield member
        kept = [other for pipe in find_lifelines(member)[0] for other in needing.get(pipe, [])]
        new = dict.fromkeys([*children.get(member, []), *kept])
        family += [other for other in new if other not in family]
