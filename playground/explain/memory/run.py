"""`--gpu-memory`: a run that says at its end what was alive on its simulated GPUs when they held
most. Does not import torch: the ranks do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playground.base.files import temporary_folder
from playground.base.remote import remote
from playground.explain.memory.peaks import read_peaks
from playground.explain.memory.report import memory_texts
from playground.explain.starts import folder_of_last_start, folder_of_this_start
from playground.ui import terminal
from playground.world.command_world import Around, CommandWorld
from playground.world.rank.assignment import call

RECORDED = remote("playground.explain.memory.recorder:recorded")


@dataclass(frozen=True)
class Recorded:
    """Calls `fn`, and records its memory into `folder`."""

    fn: Callable[..., Any]
    folder: Path

    def __call__(self, rank: int, size: int, *args: Any) -> Any:
        with RECORDED(folder_of_this_start(self.folder), rank):
            return call(self.fn, rank, size, *args)


def recorded(world: CommandWorld) -> Around:
    """What the world's runs are to happen in, so that their memory is told at the end. Ranks that
    somebody else has started tell nothing: this process does not see what they record."""
    outer = world.around
    if world.rank_env is not None:
        return outer

    @contextlib.contextmanager
    def around(world: CommandWorld, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        world.warm_up(RECORDED)
        with temporary_folder("memory") as folder:
            try:
                with outer(world, Recorded(fn, folder)) as run:
                    yield run
            finally:
                peaks = read_peaks(folder_of_last_start(folder), world.size)
                if peaks:
                    terminal.say(*memory_texts(peaks), err=True)

    return around
