"""The command `elastic`: the ranks that are killed, the cost of their failures, and the text. Does not import torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from playground.console.options import pack_options
from playground.console.session import Session
from playground.console.tables import Column, Table, numbers
from playground.console.text import good, prose
from playground.console.training import RUN_TRAINING
from playground.console.training_options import DataOptions, data_options, prepare_data
from playground.lessons import LESSONS
from playground.measurement import Fields
from playground.runtime.backends import get_backend
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import flag, like
from playground.runtime.launcher.entry import World
from playground.runtime.rank.rank import Event
from playground.runtime.temporary_folder import temporary_folder
from playground.survival.settings import SnapshotSettings
from playground.training.settings import TrainingSettings

LESSON = LESSONS["elastic"]
RUN = LESSON.remote("run")
COMPARE = LESSON.remote("compare", "comparison")
SAMPLES = 6_000
"""Training samples, unless --limit says otherwise."""


@dataclass(frozen=True)
class Kill:
    """A rank that is killed after this step of the training, before any rank takes the next."""

    rank: int
    step: int


def draw_kills(count: int, size: int, steps: int, seed: int) -> tuple[Kill, ...]:
    """`count` kills of any rank at any step, in the order of the steps, no two after the same one. Raises `UsageError`
    for too few steps."""
    if count >= steps:
        raise UsageError(f"--kills {count} in a training of {steps} steps: choose fewer, or more samples or epochs")
    random = Random(seed)
    return tuple(Kill(random.randrange(size), step) for step in sorted(random.sample(range(1, steps), count)))


Recovery = Fields
"""A `failure`, in words; the number of steps done when the rank was `killed_after` them, and of those in the snapshot
that the training `resumed_after`, 0 for none; `seconds` from the kill until the next step was completed."""


class Witness:
    """Receives the ranks' reports and failures, and takes the time. Reports of several ranks come in any order: the
    next kill may be reported before the step that precedes it."""

    def __init__(self) -> None:
        self.recoveries: list[Recovery] = []
        self.kills: list[tuple[float, int]] = []
        """Time of each kill, and the step after which it happened."""
        self.failure, self.resumed_after = "", 0
        """The failure that training has not recovered from yet, and the step it resumed after."""

    def hear(self, rank: int, event: Event) -> None:
        if "killed" in event:
            self.kills.append((time.monotonic(), event["killed"]))
        if rank == 0 and "resumed" in event:
            self.resumed_after = event["resumed"]["total"]
        if rank == 0 and "stepped" in event and self.failure:
            if len(self.kills) == len(self.recoveries):
                raise PlaygroundError(f"{self.failure}: that was none of the kills drawn here")
            killed_at, killed_after = self.kills[len(self.recoveries)]
            steps = {"killed_after": killed_after, "resumed_after": self.resumed_after}
            self.recoveries.append({"failure": self.failure, **steps, "seconds": time.monotonic() - killed_at})
            self.failure = ""

    def note_failure(self, failure: PlaygroundError, count: int) -> None:
        self.failure, self.resumed_after = failure.headline, 0


def recoveries_table(recoveries: Sequence[Recovery]) -> Table:
    """A row per failure."""
    counts = ("after\nstep", "goes on\nafter step", "steps\nredone", ("until the\nnext step", "s", ".2f"))
    table = Table(Column("failure", wraps=True), *numbers(*counts))
    for each in recoveries:
        failure, killed_after, resumed_after, seconds = each.values()
        table.add(failure, killed_after, resumed_after, killed_after - resumed_after, seconds)
    return table


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """The training, and the ranks that are killed."""

    kills: int = flag(
        2,
        "Number of ranks that are killed, one after the other, each after a step drawn at random.",
        least=1,
        most=1000,
        metavar="K",
    )
    way: str = flag("sgd", "How to average.", choices=("sgd", "ddp"))
    """Name of the lesson that averages gradients so."""
    epochs: int = like(TrainingSettings, "epochs", 1)
    snapshot_every: int = flag(10, "Steps between two snapshots.", least=1, metavar="STEPS")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The last snapshots of two trainings, byte by byte."""

    tensors: int
    nbytes: int
    differing: int
    """How many of these bytes differ."""

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors of {self.nbytes:,} bytes compared: parameters, optimizer state, totals and every "
            f"rank's random numbers; {self.differing:,} bytes differ."
        )

    def check(self) -> None:
        """Raise `PlaygroundError` if the two trainings did not end with the same bits."""
        if self.differing:
            raise PlaygroundError(
                f"the training that was killed ended elsewhere: {self.differing:,} of {self.nbytes:,} bytes differ "
                f"from those of the undisturbed one"
            )

    def check_repeatable(self, suspects: str) -> None:
        """Raise `PlaygroundError` if two undisturbed trainings did not end with the same bits: the effect of a kill
        could not be told from that. `suspects` are what on this device may do it."""
        if self.differing:
            raise PlaygroundError(
                f"two undisturbed trainings already end with different bits: {self.differing:,} of "
                f"{self.nbytes:,} bytes differ, so what a kill changes cannot be seen here; {suspects}"
            )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The same training, undisturbed and with ranks that are killed: do both end with the same bits?"""

    world: World
    settings: TrainingSettings
    asked: ElasticOptions
    folder: Path
    """Where each training has a folder for its snapshots."""
    show: Callable[[str], object]
    """Called with what comes next."""

    def conduct(self, kills: Sequence[Kill]) -> tuple[list[Recovery], Comparison]:
        """Train twice. Returns what each of the kills has cost, and how far the last snapshots differ. Raises
        `PlaygroundError` where the device does not repeat itself, so that a difference would prove nothing."""
        self.show("training, undisturbed")
        self.train("undisturbed")
        if suspects := get_backend(self.world.backend).may_differ:
            self.show("training, undisturbed, once more")
            self.train("repeated")
            self.compare("undisturbed", "repeated").check_repeatable(suspects)
        self.show("training, with ranks that are killed")
        recoveries = self.train("killed", kills)
        return recoveries, self.compare("undisturbed", "killed")

    def train(self, name: str, kills: Sequence[Kill] = ()) -> list[Recovery]:
        """Train to the end, with a new world for each that is killed. Returns what each of the kills has cost."""
        snapshots = SnapshotSettings(folder=self.folder / name, every=self.asked.snapshot_every)
        settings, witness = replace(self.settings, snapshots=snapshots), Witness()
        world, training = self.new_world(self.world.size, len(kills)), (RUN, settings, (self.asked.way, kills))
        world.run(RUN_TRAINING, *training, on_report=witness.hear, on_restart=witness.note_failure)
        if len(witness.recoveries) != len(kills):
            raise PlaygroundError(f"internal error: {len(witness.recoveries)} of {len(kills)} kills happened")
        return witness.recoveries

    def compare(self, *names: str) -> Comparison:
        """The last snapshots of two trainings, byte by byte."""
        [comparison] = self.new_world(1).run(COMPARE, *(self.folder / name for name in names))
        return comparison

    def new_world(self, size: int, restarts: int = 0) -> World:
        world = self.world
        return World(size, backend=world.backend, timeout=world.timeout, restarts=restarts, around=world.around)


@LESSON.run_by(pack_options("asked", ElasticOptions), data_options)
def command(session: Session, data: DataOptions, asked: ElasticOptions) -> None:
    world = session.world
    if world.rank_env:
        raise UsageError(f"{LESSON.name} kills ranks and starts new ones: run it without torchrun, RANK and WORLD_SIZE")
    world.warm_up(RUN_TRAINING, RUN, COMPARE)
    with temporary_folder("elastic") as folder:
        prepared = prepare_data(data, session.bar)
        if data.limit is None:
            few = min(SAMPLES, prepared.train)
            prepared = replace(prepared, limit=few, train=few)
        training = TrainingSettings(folder=prepared.folder, epochs=asked.epochs, seed=session.run.seed)
        settings = prepared.settings(training)
        settings.check_batch(world.size)
        steps = asked.epochs * math.ceil(prepared.train / settings.batch_size)
        kills = draw_kills(asked.kills, world.size, steps, session.run.seed)
        session.say(f"{LESSON.name}: {world}", f"data: {prepared}", f"training: {asked.way}, {steps} steps")
        experiment = Experiment(world=world, settings=settings, asked=asked, folder=folder, show=session.bar.show)
        recoveries, comparison = experiment.conduct(kills)
    session.say("", recoveries_table(recoveries), "", str(comparison))
    comparison.check()
    verdict = good(f"{len(kills)} kill{'s' * (len(kills) > 1)} left no trace")
    session.say(prose(f"Shown: {LESSON.conclude(world.size)}; ", verdict, "."))
    session.print_document({}, way=asked.way, dataset=prepared.summary, recoveries=recoveries, comparison=comparison)
