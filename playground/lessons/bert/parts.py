"""The parts of the lesson, in order: what each runs, on how many workers, and what is shown of it. Does not import
torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from playground.console.failures import NoticePrinter, echo_restarts
from playground.console.preemption import resumable_if_preempted
from playground.console.progress import Bar
from playground.console.session import Session
from playground.console.snapshot_options import SnapshotOptions
from playground.console.training import RUN_TRAINING
from playground.lessons import LESSONS
from playground.lessons.bert import report
from playground.lessons.bert.results import Speed, Training, compare_losses
from playground.lessons.bert.settings import DDP, BertSettings
from playground.runtime.entry import World
from playground.runtime.rank import Event
from playground.runtime.remote import Remote
from playground.training.snapshots.settings import SnapshotSettings

LESSON = LESSONS["bert"]
TRAIN, SAME_LOSSES = LESSON.remote("train"), LESSON.remote("same_losses")
TRAIN_ON = LESSON.remote("train", "resumable")
SPEED, UTILISATION = LESSON.remote("speed", "speed"), LESSON.remote("utilisation", "speed")
MEMORY, LARGEST = LESSON.remote("memory", "memory"), LESSON.remote("largest", "memory")
READY, AVERAGING = LESSON.remote("ready", "overlap"), LESSON.remote("averaging", "overlap")
WORKERS = (1, 2, 4)
"""On how many the speed is measured."""


@dataclass(frozen=True)
class Runner:
    """Runs a part on the processes that it needs, and says what came of it."""

    session: Session
    bar: Bar
    settings: BertSettings
    ways: tuple[str, ...]
    """Those that were asked for."""
    survival: SnapshotOptions
    """Of training; the other parts are short."""

    def run(self, code: Remote, settings: BertSettings) -> Any:
        """What each rank returned, in a world with as many ranks as the way takes."""
        return self.new_world(code, settings).run(RUN_TRAINING, code, settings, on_report=self.bar)

    def train(self, settings: BertSettings, on_report: Callable[[int, Event], None]) -> Training:
        """Training by one way, with snapshots and restarts if they are asked for."""
        restarts = self.survival.restarts
        world = self.new_world(TRAIN, settings, restarts)
        snapshots = self.snapshots_of(settings.way)
        code, more = (TRAIN_ON, (snapshots,)) if snapshots else (TRAIN, ())
        with resumable_if_preempted(self.session, self.survival, snapshots.folder if snapshots else None):
            results = world.run(
                RUN_TRAINING, code, settings, more, on_report=on_report, on_restart=echo_restarts(restarts),
                grace=self.survival.grace_of_ranks,
            )  # fmt: skip
        result: Training = results[0]
        return result

    def new_world(self, code: Remote, settings: BertSettings, restarts: int = 0) -> World:
        """The world that was joined, or one with as many ranks as the way takes."""
        world = self.session.world
        self.bar.show(f"{code.name.replace('_', ' ')}: {settings.way}, {settings.workers} workers")
        if world.rank_env:
            return world
        return World(
            settings.ranks, backend=world.backend, timeout=world.timeout, init_method=world.init_method,
            restarts=restarts, around=world.around,
        )  # fmt: skip

    def snapshots_of(self, way: str) -> SnapshotSettings | None:
        """Where a way has its snapshots: of several, each has a folder of its own in the one that was asked for."""
        settings = self.survival.settings
        if settings is None or len(self.ways) == 1:
            return settings
        return replace(settings, folder=settings.folder / way)

    def run_ways(self, code: Remote) -> dict[str, Any]:
        """The same for each way."""
        return {way: self.run(code, self.settings.on(way)) for way in self.ways}

    def say(self, code: Remote, texts: report.Texts) -> None:
        self.session.say(*report.part_texts(code, texts))


def train(runner: Runner) -> list[Training]:
    """Train by each way, and show how far it has come while it does."""
    runner.say(TRAIN, [report.TRAINING_LEGEND])
    rows = runner.session.rows(*report.PROGRESS)
    shown, notices = dict.fromkeys(runner.ways, 0), NoticePrinter()

    def on_report(rank: int, event: Event) -> None:
        if rank == 0 and "resumed" in event:
            runner.session.say("  going on after step {total}".format(**event["resumed"]))
        if rank == 0 and "progress" in event and event["progress"].step > shown[event["progress"].way]:
            shown[event["progress"].way] = event["progress"].step  # a world that was restarted may report it again
            rows.say(*report.progress_cells(event["progress"]))
        notices(rank, event)
        runner.bar(rank, event)

    trainings = [runner.train(runner.settings.on(way), on_report) for way in runner.ways]
    runner.session.say("", report.training_table(trainings))
    return trainings


def same_losses(runner: Runner) -> object:
    """Compare the losses of each way with those of one device."""
    alone = runner.run(SAME_LOSSES, runner.settings.on("data-parallel", 1))[0]
    compared = compare_losses(alone, [ranks[0] for ranks in runner.run_ways(SAME_LOSSES).values()])
    runner.say(SAME_LOSSES, report.same_texts(compared))
    return compared


def speed(runner: Runner) -> list[Speed]:
    """Measure each way on 1, 2 and 4 workers, or as many of these as there are GPUs."""
    settings = runner.settings
    counts = [count for count in WORKERS if settings.batch_size % count == 0]
    found = [
        runner.run(SPEED, settings.on(way, count))[0]
        for way in runner.ways
        for count in counts
        if count <= settings.most_workers(way)
    ]
    runner.say(SPEED, report.speed_texts(found))
    return found


def utilisation(runner: Runner) -> object:
    """Each device's share of a step in which it computes."""
    found = join_ranks(runner.run_ways(UTILISATION))
    runner.say(UTILISATION, report.utilisation_texts(found))
    return found


def memory(runner: Runner) -> object:
    """What each device holds, and what that is."""
    found = join_ranks(runner.run_ways(MEMORY))
    runner.say(MEMORY, report.memory_texts(found, runner.settings))
    return found


def largest(runner: Runner) -> object:
    """The largest batch under the cap."""
    found = [ranks[0] for ranks in runner.run_ways(LARGEST).values()]
    runner.say(LARGEST, report.largest_texts(found, runner.settings))
    return found


def ready(runner: Runner) -> object:
    """When backward has which gradients."""
    found = runner.run(READY, runner.settings.on(DDP))[0]
    runner.say(READY, report.ready_texts(found, runner.settings))
    return found


def averaging(runner: Runner) -> object:
    """What averaging gradients costs in a step."""
    found = runner.run(AVERAGING, runner.settings.on(DDP))[0]
    runner.say(AVERAGING, report.averaging_texts(found, runner.settings))
    return found


def join_ranks(ways: dict[str, Any]) -> dict[str, list[Any]]:
    """By way, what was found of each device: all of one process, or one of each rank."""
    return {way: [each for rank in ranks for each in rank] for way, ranks in ways.items()}


PARTS: dict[str, Callable[[Runner], object]] = {
    "train": train, "same-losses": same_losses, "speed": speed, "utilisation": utilisation, "memory": memory,
    "largest": largest, "ready": ready, "averaging": averaging,
}  # fmt: skip
"""By the names that --only takes."""
OWN_WORLDS = ("same-losses", "speed")
"""Parts that need other numbers of ranks than the one that was asked for."""
OF_DDP = ("ready", "averaging")
"""Parts about ranks that average gradients, whatever the ways."""
