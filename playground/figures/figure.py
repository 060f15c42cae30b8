"""A figure, the run that it is drawn from, and what is known of that run. Does not import torch.

RING = FigureRun("ring", ALL_REDUCE, 4, ("ring",), recorded=True)

@figure("F9", "lessons/all_reduce/figures/ring", RING)
def ring_chunk(run: Evidence) -> Scene:
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from playground.base.files import temporary_folder
from playground.base.remote import Remote, remote
from playground.explain.replay.analyse.matching import MatchedMessage, match_messages
from playground.explain.replay.record.reading import merge
from playground.explain.replay.record.recording import RankRecording, Recording
from playground.explain.replay.record.run import Recorded, collect, describe_run
from playground.explain.replay.render.scene import Scene
from playground.world.launcher.launch import launch
from playground.world.rank.reports import Event as Report


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The outcome of a run that figures are drawn from."""

    results: list[Any]
    """Return values of its function, by rank."""
    recording: Recording | None = None
    """None where only the results are drawn, and recording would take time."""
    arguments: tuple[Any, ...] = ()
    """Arguments of the function besides rank and size."""
    reports: tuple[tuple[int, Report], ...] = ()
    """Reports of the ranks, each with its rank, in order; empty if the run was recorded."""

    @property
    def recorded(self) -> Recording:
        """The recording of a run that is recorded."""
        assert self.recording
        return self.recording

    @property
    def messages(self) -> Sequence[MatchedMessage]:
        """The recorded messages, in the order in which they were sent."""
        return match_messages(self.recorded).matched

    @property
    def last_step(self) -> Recording:
        """The recorded events after the last barrier."""

        def without_earlier(rank: RankRecording) -> RankRecording:
            barriers = (event.end for event in rank.events if event.name == "barrier")
            begin = max(barriers, default=0.0)
            events = tuple(event for event in rank.events if event.start >= begin)
            return replace(rank, events=events)

        return replace(self.recorded, ranks=tuple(map(without_earlier, self.recorded.ranks)))


def work_of(function: str) -> Remote:
    """A function of ranks.py."""
    return remote(f"playground.figures.ranks:{function}")


@dataclass(frozen=True)
class FigureRun:
    """A function that ranks run."""

    name: str
    work: Remote
    size: int
    arguments: tuple[object, ...] | Callable[[Path], tuple[object, ...]] = ()
    """Its arguments besides rank and size, or what makes them in a folder for its files."""
    recorded: bool = False
    restarts: int = 0
    """How often new ranks may replace a world that failed."""

    def arguments_in(self, folder: Path) -> tuple[object, ...]:
        """The arguments, of a run whose files lie in this folder."""
        return self.arguments(folder) if callable(self.arguments) else self.arguments

    def make(self, folder: Path) -> Evidence:
        """Run it. Raises what `launch` raises."""
        arguments = self.arguments_in(folder)
        if self.recorded:
            about = describe_run((self.name, "-n", str(self.size)), "gloo", self.size)
            with temporary_folder("recording") as recording:
                work = Recorded(self.work, recording, about)
                results = launch(work, self.size, args=arguments)
                recorded = merge(collect(recording / "0"))
            return Evidence(results=results, recording=recorded, arguments=arguments)
        reports: list[tuple[int, Report]] = []
        results = launch(
            self.work,
            self.size,
            args=arguments,
            restarts=self.restarts,
            on_restart=lambda failure, count: None,
            on_report=lambda rank, event: reports.append((rank, event)),
        )
        return Evidence(results=results, arguments=arguments, reports=tuple(reports))


@dataclass(frozen=True)
class ChangingRun(FigureRun):
    """A function that worlds of different sizes run, one after the other."""

    ends: tuple[tuple[int, int], ...] = ()
    """The size of each world, and the step at which it ends."""

    def make(self, folder: Path) -> Evidence:
        """As above; the results are those of rank 0 of each world."""
        file = folder / f"{self.name}.pt"
        results = [launch(self.work, size, args=(file, end))[0] for size, end in self.ends]
        return Evidence(results=results, arguments=self.ends)


@dataclass(frozen=True)
class Figure:
    """What `figure` makes of the function that draws it."""

    name: str
    """F1 to F21 of the tutorials; any other is that of a chapter."""
    path: str
    """Where its file is, or would be, in the package, without the ending."""
    run: FigureRun
    draw: Callable[[Evidence], Scene]
    in_chapter: bool = True
    is_played: bool = True
    """Whether the pages of `site` play its run beside it: not if it is one moment of a longer run,
    or moves by itself."""


def figure(
    name: str, path: str, run: FigureRun, **more: bool
) -> Callable[[Callable[[Evidence], Scene]], Figure]:
    """A decorator that makes a figure of the function that draws it."""
    return lambda draw: Figure(name, path, run, draw, **more)
