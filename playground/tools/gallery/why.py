"""Looks at the ranks of a run from outside, while it goes on. Does not import torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from playground.runtime.black_box import UNASKED, RankState
from playground.runtime.black_box.box import View, find_boxes, process_status
from playground.runtime.errors import UsageError

BETWEEN_LOOKS = 0.3
"""Seconds: a rank that makes no progress meanwhile stands still."""


def find_worlds(pid: int) -> list[list[View]]:
    """The black boxes of each world that process `pid` has started, or is a rank of; of those on this host. Raises
    `UsageError` if there is none."""
    if not Path(f"/proc/{pid}").exists():
        raise UsageError(f"there is no process {pid}: ps -ef lists those that run")
    worlds = {world for box in find_boxes(list_family(pid)) if (world := box.world)}
    if not worlds:
        raise UsageError(f"process {pid} has started no ranks that may be looked at: name that of a run, as its user")
    everyone = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    boxes = [*find_boxes(everyone)]
    return [[box for box in boxes if box.world == world] for world in sorted(worlds)]


def list_family(pid: int) -> Iterator[int]:
    """A process, and those that it has started."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (status := process_status(int(entry))):
            children.setdefault(int(status[1]), []).append(int(entry))
    family = [pid]
    for member in family:
        yield member
        family += children.get(member, [])


def look_twice(boxes: Sequence[View]) -> list[RankState]:
    """What each rank does. One that goes on between two looks is in the program. From outside, no deadlock is proved:
    its launcher does that."""
    before = [box.progress for box in boxes]
    time.sleep(BETWEEN_LOOKS)
    return [replace(box.read_since(was), may_act=UNASKED) for box, was in zip(boxes, before, strict=True)]
