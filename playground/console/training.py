"""Commands that train: their options, the data, the epochs as soon as they are known, and the
result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from playground.checkpoint.folder import SnapshotSettings
from playground.console.lesson import Lesson
from playground.console.options import pack_options
from playground.console.session import Session
from playground.console.tables import Column, Rows, Text, figures
from playground.console.terminal import Bar
from playground.console.text import good, prose
from playground.runtime.errors import PlaygroundError, Preempted, UsageError
from playground.runtime.flags import ANY, flag
from playground.runtime.launcher.launch import describe_restart
from playground.runtime.rank.reports import Event
from playground.runtime.remote import Remote, remote
from playground.runtime.untrusted import printable
from playground.training import prepare
from playground.training.one_process import EXACT_STEPS
from playground.training.prepare import PreparedData, Settings
from playground.training.results import Epoch, TrainingResult, replicas_verdict
from playground.training.settings import TrainingSettings

DIVERGED = "training diverged: the loss is no longer a finite number; try a smaller --lr"
GRACE = 30.0
"""Seconds for a last snapshot after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions:
    snapshots: Path | None = flag(
        None,
        "Take snapshots of the training, in this folder, and resume from the newest.",
        metavar="DIR",
    )
    snapshot_every: int = flag(
        SnapshotSettings.every,
        "Steps between two snapshots.",
        least=1,
        metavar="STEPS",
        needs={"snapshots": ANY},
    )
    restarts: int = flag(
        0,
        "How often to restart all ranks after a failure.",
        least=0,
        most=1000,
        metavar="K",
    )

    @property
    def settings(self) -> SnapshotSettings | None:
        if self.snapshots is None:
            return None
        return SnapshotSettings(folder=self.snapshots.absolute(), every=self.snapshot_every)


snapshot_options = pack_options("checkpoint", SnapshotOptions)
"""Gives a command the argument `checkpoint`: its `SnapshotOptions`."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    dataset: str = flag(
        "auto",
        "auto: MNIST if it is here or can be downloaded, else generated digits.",
        choices=prepare.DATASETS,
    )
    data_dir: Path | None = flag(
        None,
        "Directory of the data; what is missing is put there.",
        shown_default=f"${prepare.DATA_DIR}, else ~/.cache/playground",
    )
    limit: int | None = flag(None, "Train on the first N samples only.", least=1, metavar="N")

    @property
    def folder(self) -> Path:
        """Where the data is or will be put. Raises `NoData` if that is not given and the user has
        no home."""
        return self.data_dir or prepare.default_data_dir()


def data_options(*names: str) -> Callable[[Any], Any]:
    """Gives a command the argument `data`: its `DataOptions`, made of these options, or of all."""
    return pack_options("data", DataOptions, *names)


def prepare_data(asked: DataOptions, bar: Bar) -> PreparedData:
    """Get the data onto this host; `bar` shows what takes long. Raises `NoData`, and `UsageError`
    for a limit beyond the data."""
    data = prepare.prepare(
        asked.dataset, asked.folder, os.environ.get(prepare.MIRROR), bar.announce
    )
    if asked.limit and asked.limit > data.train:
        raise UsageError(f"--limit {asked.limit}: {data.name} has {data.train} samples to train on")
    return replace(data, limit=asked.limit, train=asked.limit or data.train)


EPOCH_COLUMNS = (
    Column("epoch", right=True, width=5),
    Column("train\nloss", "", ".4f", right=True, width=8),
    Column("train\naccuracy", "%", ".2f", 100, right=True, width=8),
    Column("test\naccuracy", "%", ".2f", 100, right=True, width=8),
    Column("speed", "samples/s", ",.0f", right=True, width=11),
    Column("time", "s", ".1f", right=True, width=7),
    Column("train loss\nof each rank", width=12, wide=True),
)
EPOCH_LEGEND = (
    "train loss, accuracy: means over the epoch's samples, while the model changes; test accuracy: "
    "after the epoch, on all test images; speed, time: training only, without the test"
)


COMPARED = f"differences are those after {EXACT_STEPS} steps of AdamW in float64"
TRAINED = figures(
    ("step_seconds", "step", "ms", ".1f", 1000),
    ("first", "first\nloss", "", ".3f"),
    ("last", "last\nloss", "", ".3f"),
    ("loss_difference", "loss, from\none process", "", ".1e"),
    ("parameter_difference", "parameters, from\none process", "", ".1e"),
)
"""Columns of a `ComparedTraining`."""


class EpochPrinter:
    """Called with what ranks report of their training: prints a row for each epoch as soon as it is
    known; and about snapshots notices of rank 0, and problems of any rank with its disk, each
    once."""

    def __init__(self, session: Session) -> None:
        self.session, self.rows = session, Rows(session.say, *EPOCH_COLUMNS)
        self.shown, self.problems = 0, set[str]()
        session.say("", EPOCH_LEGEND)

    def __call__(self, rank: int, event: Event) -> None:
        if rank == 0 and "resumed" in event:
            self.session.say(
                "  going on after step {step} of epoch {epoch}".format(**event["resumed"])
            )
        if rank == 0 and "finished" in event:
            epoch: Epoch = event["finished"]
            if epoch.epoch > self.shown:  # a world that was restarted may train it again
                self.shown = epoch.epoch
                self.show(epoch)
        if rank == 0 and "notice" in event:
            click.echo(printable(event["notice"]), err=True)
        if "problem" in event and event["problem"] not in self.problems:
            self.problems.add(event["problem"])
            click.echo(printable(event["problem"]), err=True)

    def show(self, epoch: Epoch) -> None:
        accuracies = epoch.train_accuracy, epoch.test_accuracy
        of_ranks = (
            f"Rank {rank}, epoch {epoch.epoch}: {'-' if loss is None else f'{loss:.4f}'}"
            for rank, loss in enumerate(epoch.loss_per_rank)
        )
        speed = epoch.samples_per_second, epoch.seconds
        self.rows.say(epoch.epoch, epoch.loss, *accuracies, *speed, "\n".join(of_ranks))


def announce_data(
    session: Session,
    data: DataOptions,
    asked: Settings,
    *about: Text,
    ready: PreparedData | None = None,
    check: Callable[[int], None] | None = None,
) -> tuple[PreparedData, Settings]:
    """Prepare the data, unless it is `ready`, and say the head of the run: its world, the data, and
    `about`. Returns the data, and the settings `asked` for on it. Raises `UsageError` for less data
    than one batch, or what `check` raises, which is called with the number of samples in its
    place."""
    prepared = ready or prepare_data(data, session.bar)
    (check or asked.check_samples)(prepared.train)
    session.say(f"{session.name}: {session.world}", f"data: {prepared}", *about)
    return prepared, prepared.settings(asked)


def over_links(session: Session, link: float) -> str:
    """The words on simulated links of `link` Gbit/s; none for 0. Raises `UsageError` where a link
    cannot be simulated."""
    if link and session.world.device != "cpu":
        raise UsageError(f"--link {link:g}: the simulation delays CPUs, on gloo: leave it out")
    return f", over simulated links of {link:g} Gbit/s" if link else ""


RUN_TRAINING = remote("playground.training.loop:run_training")
RUN_BOARD = remote("playground.training.loop:run_board")


def train_and_show(
    session: Session,
    lesson: Lesson,
    general: Remote,
    data: DataOptions,
    checkpoint: SnapshotOptions,
    **training: Any,
) -> None:
    """Train as the lesson's board does or, where its loop will not do, as `general` does.
    `training`: further fields of `TrainingSettings`. Training whose ranks fail is restarted as
    often as `checkpoint` allows, from its snapshots, if it takes any. Training that diverges is a
    result like any other, with a word about it on stderr. `Preempted` gets a hint how to resume; of
    a world that was joined, only the process that shows results raises it."""
    session.restarts = checkpoint.restarts
    training |= {"limit": data.limit, "seed": session.run.seed, "snapshots": checkpoint.settings}
    asked = TrainingSettings(folder=data.folder, **training)
    asked.check_batch(session.world.size)
    board = lesson.remote("run")
    function, more = (RUN_BOARD, (board,)) if asked.is_tutorial else (general, ())
    session.world.warm_up(board, function, RUN_TRAINING)
    prepared, settings = announce_data(session, data, asked, check=asked.check_accumulation)
    printer = EpochPrinter(session)
    grace = GRACE if checkpoint.snapshots else None  # without snapshots there is nothing to store

    def say_why(failure: PlaygroundError, count: int) -> None:
        click.echo(
            f"{printable(describe_restart(failure, count), lines=True)} of {checkpoint.restarts}",
            err=True,
        )

    try:
        how: dict[str, Any] = {"on_report": printer, "on_restart": say_why, "grace": grace}
        result, *_ = session.launch(RUN_TRAINING, function, settings, more, **how)
    except Preempted as preemption:
        if not session.world.is_main:
            sys.exit(preemption.exit_code)
        preemption.hint = "the same command resumes from there"
        raise
    show_result(session, lesson, prepared, result)


def show_result(
    session: Session,
    lesson: Lesson,
    data: PreparedData,
    result: TrainingResult,
) -> None:
    """Show the result of training on `data`. Raises `PlaygroundError`
    if replicas differ that must not."""
    best = result.best
    session.say("", f"Best test accuracy: {best.test_accuracy:.2%}, after epoch {best.epoch}.")
    if result.diverged:
        click.echo(DIVERGED, err=True)
    losses = [{"loss": loss} for loss in result.epochs[-1].loss_per_rank]
    about = {"dataset": data.summary, "replicas_max_difference": result.replicas_max_difference}
    session.print_document({"run": losses}, best=best, epochs=result.epochs, **about)
    verdict = replicas_verdict(result.replicas_max_difference, name=result.replicas_differ_in)
    concluded = lesson.conclude(session.world.size, accuracy=best.test_accuracy)
    session.say(
        prose(
            f"Shown: {concluded}; ",
            good(verdict),
            ".",
        )
    )
