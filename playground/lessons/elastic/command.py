"""The command `elastic`: the same training undisturbed, and with ranks that are killed."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import click

from playground.console.options import RunOptions, options, run_options
from playground.console.progress import Bar
from playground.console.session import Session
from playground.console.text import good, prose
from playground.console.training import RUN_TRAINING
from playground.console.training_options import DataOptions, data_options, prepare_data
from playground.lessons import LESSONS
from playground.lessons.elastic import report
from playground.lessons.elastic.results import Recovery
from playground.lessons.elastic.settings import WAYS, Kill, draw_kills
from playground.runtime.backends import get_backend
from playground.runtime.entry import World
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.rank import Event
from playground.runtime.remote import remote
from playground.runtime.temporary_folder import temporary_folder
from playground.training.settings import TrainingSettings
from playground.training.snapshots.comparison import Comparison, last_snapshot
from playground.training.snapshots.settings import SnapshotSettings

LESSON = LESSONS["elastic"]
RUN = LESSON.remote("run")
COMPARE = remote("playground.training.snapshots.compare:compare")
SAMPLES = 6_000
"""To train on, unless --limit says otherwise."""

elastic_options = options(
    click.option(
        "--kills", type=click.IntRange(1, 1000), default=2, show_default=True, metavar="K",
        help="Number of ranks that are killed, one after the other, each after a step drawn at random.",
    ),
    click.option("--way", type=click.Choice(WAYS), default="sgd", show_default=True, help="How to average."),
    click.option("--epochs", type=click.IntRange(1), default=1, show_default=True, help="Passes over the data."),
    click.option(
        "--snapshot-every", type=click.IntRange(1), default=10, show_default=True, metavar="STEPS",
        help="Steps between two snapshots.",
    ),
    data_options,
)  # fmt: skip


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@run_options(LESSON.default_size)
@elastic_options
def command(
    run: RunOptions, data: DataOptions, kills: int, way: str, epochs: int, snapshot_every: int
) -> None:  # fmt: skip
    session = Session(LESSON.name, run, default_size=LESSON.default_size)
    world = session.world
    if world.rank_env:
        raise UsageError(f"{LESSON.name} kills ranks and starts new ones: run it without torchrun, RANK and WORLD_SIZE")
    world.warm_up(RUN_TRAINING, RUN, COMPARE)
    with session.bar() as bar, temporary_folder("elastic") as folder:
        prepared = prepare_data(data, bar)
        if data.limit is None:
            few = min(SAMPLES, prepared.train)
            prepared = replace(prepared, limit=few, train=few)
        asked = TrainingSettings(folder=prepared.folder, epochs=epochs, seed=run.seed)
        asked.check_batch(world.size)
        settings = prepared.settings(asked)
        steps = epochs * math.ceil(prepared.train / settings.batch_size)
        drawn = draw_kills(kills, world.size, steps, run.seed)
        story = Story(session, bar, way, replace(settings, snapshots=None), snapshot_every)
        session.say(f"{LESSON.name}: {world}", f"data: {prepared}", f"training: {way}, {steps} steps")
        bar.show("training, undisturbed")
        story.train(folder / "undisturbed", ())
        if suspects := get_backend(world.backend).may_differ:
            bar.show("training, undisturbed, once more")
            story.train(folder / "repeated", ())
            story.compare(folder / "undisturbed", folder / "repeated").check_repeatable(suspects)
        bar.show("training, with ranks that are killed")
        recoveries = story.train(folder / "killed", drawn)
        comparison = story.compare(folder / "undisturbed", folder / "killed")
    session.say("", report.recoveries_table(recoveries), "", str(comparison))
    comparison.check()
    verdict = good(f"{len(drawn)} kill{'s' * (len(drawn) > 1)} left no trace")
    session.say(prose(f"Shown: {LESSON.conclude(world.size)}; ", verdict, "."))
    session.print_document({}, way=way, dataset=prepared.summary, recoveries=recoveries, comparison=comparison)


class Story:
    """The same training, told with kills and without."""

    def __init__(self, session: Session, bar: Bar, way: str, settings: TrainingSettings, every: int) -> None:
        self.session, self.bar, self.way, self.settings, self.every = session, bar, way, settings, every

    def train(self, folder: Path, kills: tuple[Kill, ...]) -> list[Recovery]:
        """Train to the end, with snapshots in `folder`. What each of the kills has cost."""
        snapshots = SnapshotSettings(folder=folder, every=self.every)
        settings = replace(self.settings, snapshots=snapshots)
        witness = Witness()
        world = self.session.world
        ranks = World(
            world.size, backend=world.backend, timeout=world.timeout, restarts=len(kills), around=world.around
        )
        ranks.run(
            RUN_TRAINING, RUN, settings, (self.way, kills), on_report=witness.hear, on_restart=witness.note_failure
        )
        if len(witness.recoveries) != len(kills):
            raise PlaygroundError(f"{len(witness.recoveries)} of {len(kills)} kills happened: this must not be")
        return witness.recoveries

    def compare(self, *folders: Path) -> Comparison:
        """The ends of two trainings, byte by byte."""
        world, ends = self.session.world, map(last_snapshot, folders)
        [comparison] = World(1, backend=world.backend, timeout=world.timeout, around=world.around).run(COMPARE, *ends)
        return comparison


class Witness:
    """Hears what ranks report, and of their failures, and takes the time.

    What several ranks report is heard in any order: word of the next kill may come before that of the step before it.
    """

    def __init__(self) -> None:
        self.recoveries: list[Recovery] = []
        self.kills: list[tuple[float, int]] = []
        """When each was, and after which step."""
        self.failure = ""
        """The one that training has not recovered from yet."""
        self.resumed_after = 0

    def hear(self, rank: int, event: Event) -> None:
        if "killed" in event:
            self.kills.append((time.monotonic(), event["killed"]))
        if rank == 0 and "resumed" in event:
            self.resumed_after = event["resumed"]["total"]
        if rank == 0 and "stepped" in event and self.failure:
            killed_at, killed_after = self.kills[len(self.recoveries)]
            self.recoveries.append(
                Recovery(
                    failure=self.failure, killed_after=killed_after, resumed_after=self.resumed_after,
                    seconds=time.monotonic() - killed_at,
                )
            )  # fmt: skip
            self.failure = ""

    def note_failure(self, failure: PlaygroundError, count: int) -> None:
        self.failure, self.resumed_after = failure.headline, 0
