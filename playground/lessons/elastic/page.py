"""The command `elastic`: the ranks that are killed, the cost of their failures, and the text. Does
not import torch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from playground.checkpoint.folder import SnapshotSettings
from playground.console.options import pack_options
from playground.console.session import Session
from playground.console.tables import Column, figures, tabulate
from playground.console.text import good, prose
from playground.console.training import RUN_TRAINING, DataOptions, data_options, prepare_data
from playground.console.units import plural
from playground.lessons import LESSONS
from playground.runtime.backends import get_backend
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.files import temporary_folder
from playground.runtime.flags import flag, like
from playground.runtime.launcher.entry import CommandWorld
from playground.runtime.rank.reports import Event
from playground.training.settings import TrainingSettings

LESSON = LESSONS["elastic"]
RUN = LESSON.remote("run", "experiment")
COMPARE = LESSON.remote("compare", "experiment")
COMPARED = (
    "{tensors} tensors of {nbytes:,} bytes compared: parameters, optimizer state, totals and every "
    "rank's random "
    "numbers; {differing:,} bytes differ."
)
SAMPLES = 6_000
"""Training samples, unless --limit says otherwise."""


Kill = tuple[int, int]
"""A rank, and the step of the training after which it is killed, before any rank takes the next."""


def draw_kills(count: int, size: int, steps: int, seed: int) -> tuple[Kill, ...]:
    """`count` kills of any rank at any step, in the order of the steps, no two after the same one.
    Raises `UsageError` for too few steps."""
    if count >= steps:
        raise UsageError(
            f"--kills {count} in a training of {steps} steps: choose fewer, or more samples or "
            "epochs"
        )
    random = Random(seed)
    return tuple(
        (random.randrange(size), step) for step in sorted(random.sample(range(1, steps), count))
    )


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The recovery from one failure."""

    failure: str
    """In words."""
    killed_after: int
    """Number of steps done when the rank was killed."""
    resumed_after: int
    """Number of steps in the snapshot that the training resumed from; 0 without one."""
    seconds: float
    """From the kill until the next step was done."""

    @property
    def redone(self) -> int:
        """Number of steps that were taken twice."""
        return self.killed_after - self.resumed_after


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of two snapshots."""

    tensors: int
    nbytes: int
    differing: int
    """How many of the `nbytes` differ."""


class Witness:
    """Receives the ranks' reports and failures, and takes the time. Reports of several ranks come
    in any order: the next kill may be reported before the step that precedes it."""

    def __init__(self) -> None:
        self.recoveries: list[Recovery] = []
        self.kills: list[tuple[float, int]] = []
        """Time of each kill, and the step after which it happened."""
        self.failure = ""
        """The failure that training has not recovered from yet, in words."""
        self.resumed_after = 0
        """The step after which it resumed."""

    def hear(self, rank: int, event: Event) -> None:
        if "killed" in event:
            self.kills.append((time.monotonic(), event["killed"]))
        if rank == 0 and "resumed" in event:
            self.resumed_after = event["resumed"]["total"]
        if rank == 0 and "stepped" in event and self.failure:
            if len(self.kills) == len(self.recoveries):
                raise PlaygroundError(f"{self.failure}: that was none of the kills drawn here")
            killed_at, killed_after = self.kills[len(self.recoveries)]
            recovery = Recovery(
                failure=self.failure,
                killed_after=killed_after,
                resumed_after=self.resumed_after,
                seconds=time.monotonic() - killed_at,
            )
            self.recoveries.append(recovery)
            self.failure = ""

    def note_failure(self, failure: PlaygroundError, count: int) -> None:
        self.failure = failure.headline
        self.resumed_after = 0


RECOVERY = {"failure": Column("failure", wraps=True)} | figures(
    ("killed_after", "after\nstep"), ("resumed_after", "goes on\nafter step"), ("redone",
    "steps\nredone"),
    ("seconds", "until the\nnext step", "s", ".2f"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    kills: int = flag(
        2,
        "Number of ranks that are killed, one by one, each at a random step.",
        least=1,
        most=1000,
        metavar="K",
    )
    way: str = flag("sgd", "How to average.", choices=("sgd", "ddp"))
    """Name of the lesson that averages gradients so."""
    epochs: int = like(TrainingSettings, "epochs", 1)
    snapshot_every: int = flag(10, "Steps between two snapshots.", least=1, metavar="STEPS")


def conduct(
    session: Session,
    settings: TrainingSettings,
    asked: ElasticOptions,
    kills: Sequence[Kill],
    folder: Path,
) -> tuple[list[Recovery], Comparison]:
    """Train twice, undisturbed and with ranks that are killed: do both end with the same bits?
    Returns what each of the kills has cost, and how far the last snapshots differ (see
    experiment.py); `folder` has one for each training."""
    attempts = {
        name: replace(
            settings, snapshots=SnapshotSettings(folder=folder / name, every=asked.snapshot_every)
        )
        for name in ("undisturbed", "killed")
    }
    session.bar.show("training, undisturbed")
    train(session, attempts["undisturbed"], asked.way)
    session.bar.show("training, with ranks that are killed")
    recoveries = train(session, attempts["killed"], asked.way, kills)
    [comparison] = new_world(session.world, 1).run(
        COMPARE, folder / "undisturbed", folder / "killed"
    )
    return recoveries, comparison


def train(
    session: Session, settings: TrainingSettings, way: str, kills: Sequence[Kill] = ()
) -> list[Recovery]:
    """Train to the end, with a new world for each that is killed. Returns what each of the kills
    has cost."""
    witness, world = Witness(), new_world(session.world, session.world.size, len(kills))
    told, failed = witness.hear, witness.note_failure
    world.run(RUN_TRAINING, RUN, settings, (way, kills), on_report=told, on_restart=failed)
    if len(witness.recoveries) != len(kills):
        raise PlaygroundError(
            f"internal error: {len(witness.recoveries)} of {len(kills)} kills happened"
        )
    return witness.recoveries


def new_world(world: CommandWorld, size: int, restarts: int = 0) -> CommandWorld:
    config, around = world.config, world.around
    return CommandWorld(
        size, around=around, backend=config.backend, timeout=config.timeout, restarts=restarts
    )


@LESSON.run_by(pack_options("asked", ElasticOptions), data_options("dataset", "limit"))
def command(session: Session, data: DataOptions, asked: ElasticOptions) -> None:
    world = session.world
    if world.rank_env:
        raise UsageError(
            f"{LESSON.name} kills ranks and starts new ones: run it without torchrun, RANK and "
            "WORLD_SIZE"
        )
    world.warm_up(RUN_TRAINING, RUN, COMPARE)
    prepared = prepare_data(data, session.bar)
    if data.limit is None:
        few = min(SAMPLES, prepared.train)
        prepared = replace(prepared, limit=few, train=few)
    training = TrainingSettings(folder=prepared.folder, epochs=asked.epochs, seed=session.run.seed)
    settings = prepared.settings(training)
    settings.check_batch(world.size)
    steps = asked.epochs * math.ceil(prepared.train / settings.batch_size)
    kills = draw_kills(asked.kills, world.size, steps, session.run.seed)
    session.say(
        f"{LESSON.name}: {world}", f"data: {prepared}", f"training: {asked.way}, {steps} steps"
    )
    with temporary_folder("elastic") as folder:
        recoveries, compared = conduct(session, settings, asked, kills, folder)
    rows = [{**vars(each), "redone": each.redone} for each in recoveries]
    session.say("", tabulate(rows, RECOVERY), "", COMPARED.format(**vars(compared)))
    if compared.differing:
        differ = (
            f"{compared.differing:,} of {compared.nbytes:,} bytes differ from those of "
            "the undisturbed one"
        )
        why = get_backend(world.backend).may_differ
        raise PlaygroundError(
            "; ".join(
                filter(None, [f"the training that was killed ended elsewhere: {differ}", why])
            )
        )
    verdict = good(f"{plural(len(kills), 'kill')} left no trace")
    redone = sum(each.redone for each in recoveries)
    shown = LESSON.conclude(world.size, redone=redone, steps=steps)
    session.say(prose(f"Shown: {shown}; ", verdict, "."))
    session.print_document(
        {}, way=asked.way, dataset=prepared.summary, recoveries=recoveries, comparison=compared
    )
