"""What commands that train do: prepare the data, train, show every epoch, and what came of it."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from playground.console.epochs import EpochPrinter
from playground.console.options import RunOptions
from playground.console.session import Session
from playground.console.steps import Lesson
from playground.console.text import good, prose
from playground.console.training_options import (
    DataOptions,
    PreparedData,
    SnapshotOptions,
    describe_logical_ranks,
    prepare_data,
)
from playground.runtime.errors import PlaygroundError, Preempted, RankFailed, UsageError
from playground.runtime.rank import Event
from playground.runtime.remote import Remote, remote
from playground.runtime.restarts import OnRestart, describe_restart
from playground.runtime.signals import stopping_signal
from playground.runtime.surroundings import working_folder
from playground.runtime.untrusted import printable
from playground.runtime.watch import describe_loss
from playground.survival.folder import write_marker
from playground.survival.settings import AUTO
from playground.training.grad_syncs import RUNGS
from playground.training.results import Epoch, TrainingResult, replicas_verdict
from playground.training.settings import TrainingSettings


class NoticePrinter:
    """Prints what ranks report of their snapshots: rank 0 for all, but a problem any rank may have with its disk. What
    several have, once."""

    def __init__(self) -> None:
        self.problems: set[str] = set()

    def __call__(self, rank: int, event: Event) -> None:
        if rank == 0 and "notice" in event:
            click.echo(printable(event["notice"]), err=True)
        if "problem" in event and event["problem"] not in self.problems:
            self.problems.add(event["problem"])
            click.echo(printable(event["problem"]), err=True)


def echo_loss(failure: RankFailed) -> None:
    """What is called when a rank has died and the others go on: says so."""
    click.echo(printable(describe_loss(failure), lines=True), err=True)


def echo_restarts(restarts: int) -> OnRestart:
    """What is called before each restart, of so many at most: says why there is one."""

    def echo(failure: PlaygroundError, count: int) -> None:
        click.echo(f"{printable(describe_restart(failure, count), lines=True)} of {restarts}", err=True)

    return echo


class FinishedEpochs:
    """Keeps every epoch that rank 0 reports as finished: `keep` is to hear of all reports."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []

    def keep(self, rank: int, event: Event) -> None:
        """Take a report, as `World.run` hands it on."""
        if rank == 0 and "finished" in event:
            epoch: Epoch = event["finished"]
            self.epochs = [*self.epochs[: epoch.epoch - 1], epoch]  # one that was restarted may report it again

    @contextlib.contextmanager
    def printed_if_stopped(self, session: Session, **about: object) -> Iterator[None]:
        """Whatever ends the training in here, Ctrl-C, SIGTERM or a rank that failed, goes on its way after the document
        has been printed: the epochs so far, `complete` false, and `stopped_by`, the signal or what the rank did.

        `about`: further fields of the document.
        """
        try:
            yield
        except UsageError:  # nothing was trained
            raise
        except (PlaygroundError, KeyboardInterrupt, SystemExit) as error:
            best = max(self.epochs, key=lambda epoch: epoch.test_accuracy, default=None)
            session.print_document(
                {}, **about, best=best, epochs=self.epochs, complete=False, stopped_by=describe_stop(error)
            )
            raise


def describe_stop(error: BaseException) -> str:
    """What ended a run, in a few words: a signal by name, or the first line of an error."""
    number = stopping_signal(error)
    return number.name if number else str(error).partition("\n")[0]


@contextlib.contextmanager
def resumable_if_preempted(session: Session, survival: SnapshotOptions, folder: Path | None) -> Iterator[None]:
    """Let `Preempted`, raised in here, go its way with a hint where to read how to go on; for the process that shows
    results, that is. The others of a world that was joined exit with the same code, without a word.

    The file lies in the run's `folder` of snapshots. It is written once on every host: each may have its own.
    """
    try:
        yield
    except Preempted as preemption:
        world = session.world
        if world.rank_env is None or world.rank_env.local_rank == 0:
            preemption.hint = leave_word(preemption, survival, folder, world.rank_env is not None)
        if not world.is_main:
            sys.exit(preemption.exit_code)
        raise


def leave_word(preemption: Preempted, survival: SnapshotOptions, folder: Path | None, joined: bool) -> str:
    """Write the file; return where it is, or why it is not."""
    if folder is None:
        return ""
    about = {
        "step": preemption.step, "signal": preemption.signal, "working folder": working_folder(),
        "command of each rank" if joined else "command": command_to_go_on(survival),
    }  # fmt: skip
    try:
        file = write_marker(folder, about)
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror})"
    return f"{file} says how to go on"


def command_to_go_on(survival: SnapshotOptions) -> str:
    """The command line of this process, but from the newest snapshot, whatever it went on from itself."""
    newest = () if survival.resume == AUTO else ("--resume", AUTO)
    return shlex.join(["python", "-m", "playground", *sys.argv[1:], *newest])


RUN_TRAINING = remote("playground.training.runner:run_training")
LOADER_MODULES = {
    "per-sample": ("torchvision.transforms",), "paths": ("torchvision.transforms", "PIL.PngImagePlugin"),
}  # fmt: skip
"""What ranks import for a way to fetch samples: the fork server does, once."""


def train_and_show(
    lesson: Lesson, general: Remote, run: RunOptions, data: DataOptions, survival: SnapshotOptions, **training: Any
) -> None:
    """Train as the lesson's own `run` does or, where its loop will not do, as `general` does.

    `training`: further fields of `TrainingSettings`. Training whose ranks fail is started anew, as often as `survival`
    allows, and goes on from its snapshots, if it takes any: later, too, if it is asked to end for now. Training that
    diverges is a result like any other, with a word about it on stderr. Training that is stopped leaves its document,
    with the epochs it had finished, and its exit code.
    """
    session = Session(lesson.name, run, default_size=lesson.default_size, restarts=survival.restarts)
    world = session.world
    asked = TrainingSettings(
        folder=data.folder, limit=data.limit, seed=run.seed, snapshots=survival.settings, **training
    )
    asked.check_batch(world.size)
    function = lesson.remote("run") if asked.is_tutorial else general
    world.warm_up(function, RUN_TRAINING, *LOADER_MODULES.get(asked.loader, ()))
    with session.bar() as bar:
        prepared = prepare_data(data, bar, as_files=asked.loader == "paths")
        asked.check_accumulation(prepared.train)
        settings = prepared.settings(asked)
        session.say(f"{lesson.name}: {world}", f"data: {prepared}", *describe_logical_ranks(settings, world.size))
        finished, printer, notices = FinishedEpochs(), EpochPrinter(session, bar), NoticePrinter()

        def on_report(rank: int, event: Event) -> None:
            finished.keep(rank, event)
            printer(rank, event)
            notices(rank, event)

        stopped = finished.printed_if_stopped(session, dataset=prepared.summary)
        with stopped, resumable_if_preempted(session, survival, survival.snapshots):
            bar.show(f"starting {world.size} ranks")
            [result, *_] = world.run(
                RUN_TRAINING, function, settings, on_report=on_report,
                on_restart=echo_restarts(survival.restarts), grace=survival.grace_of_ranks,
            )  # fmt: skip
    show_result(session, lesson, settings, prepared, result)


def show_result(
    session: Session, lesson: Lesson, settings: TrainingSettings, data: PreparedData, result: TrainingResult
) -> None:
    """Show what came of training with `settings` on `data`. Raises `PlaygroundError` if replicas differ that must
    not."""
    best = result.best
    session.say("", f"Best test accuracy: {best.test_accuracy:.2%}, after epoch {best.epoch}.")
    if result.diverged:
        click.echo("training diverged: the loss is no longer a finite number; try a smaller --lr", err=True)
    session.print_document(
        {"run": [{"loss": loss} for loss in result.epochs[-1].loss_per_rank]},
        dataset=data.summary, best=best, epochs=result.epochs,
        replicas_max_difference=result.replicas_max_difference, complete=True,
    )  # fmt: skip
    verdict = replicas_verdict(result.replicas_max_difference, settings.all_reduce, result.replicas_differ_in)
    averaged = "gradients" if settings.sync in RUNGS else "parameters"
    session.say(prose(f"Shown: {lesson.conclude(session.world.size, averaged=averaged)}; ", good(verdict), "."))
