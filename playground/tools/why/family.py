"""The processes of a run. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from playground.base.process_status import list_processes, process_status
from playground.world.rank.process import find_lifelines


def list_family(pid: int) -> Iterator[int]:
    """A process, and those that it has started: its fork server, too, which is no child of it, but
    ends with it."""
    children: dict[int, list[int]] = {}
    needing: dict[str, list[int]] = {}
    for member in list_processes():
        if status := process_status(member):
            children.setdefault(int(status[1]), []).append(member)
            for pipe in find_lifelines(member)[1]:
                needing.setdefault(pipe, []).append(member)
    family = [pid]
    for member in family:
        yield member
        kept = [other for pipe in find_lifelines(member)[0] for other in needing.get(pipe, [])]
        new = dict.fromkeys([*children.get(member, []), *kept])
        family += [other for other in new if other not in family]
