"""The command line put together: each lesson's command, and each tool's. Importing it does not
import torch."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

from playground import tools
from playground.base import process_checks, signals
from playground.base.errors import PlaygroundError
from playground.base.remote import remote
from playground.base.untrusted import printable
from playground.exercises import EXERCISES
from playground.figures import SEE
from playground.lessons import LESSONS, PARTS, ROWS
from playground.lessons.lesson_row import Lesson
from playground.play import PLAY
from playground.site import READ, SITE

TOOLS = {**tools.TOOLS, SEE.name: SEE}
SECTIONS: dict[str, tuple[Lesson | tools.Tool, ...]] = {
    **{title: tuple(part) for title, part in PARTS.items()},
    "Exercises that check themselves": tuple(EXERCISES.values()),
    "Tools": (PLAY, *TOOLS.values(), SITE, READ),
}
"""All commands, under the titles of --help."""
COMMANDS = {each.name: each for section in SECTIONS.values() for each in section}
LESSONS_BY_FOLDER = {Path(lesson.path).name: lesson for lesson in ROWS}
"""Further names of lessons: those of their folders."""
INTERRUPTED = 128 + signal.SIGINT
STARTED_AS_RANK = {"RANK", "WORLD_SIZE"}
STARTED_BY_OTHERS = {*STARTED_AS_RANK, "SLURM_STEP_NUM_TASKS"}
GRACE = 1.0
"""Seconds a rank that is told to end has for an orderly end."""
END_SERVERS = remote("playground.world.launcher.fork_client:end_servers")
RECORDINGS = remote("playground.explain.replay.see:Recordings")
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def say_purpose(row: Lesson | tools.Tool) -> str:
    """What a command is for, in a line of --help."""
    return row.purpose if isinstance(row, tools.Tool) else row.teaches


class UnreadOutput(Exception):
    """The reader of stdout has closed it, as in `… | head -1`."""


@contextlib.contextmanager
def keep_broken_pipe() -> Iterator[None]:
    """Raise `UnreadOutput` instead of `BrokenPipeError`, of which click makes an exit with code
    1."""
    try:
        yield
    except BrokenPipeError as error:
        raise UnreadOutput from error


class Commands(click.Group):
    """Imports a command when it is asked for: a run loads one lesson, and not all."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with keep_broken_pipe():  # --help prints here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with keep_broken_pipe():
            result = super().invoke(ctx)
            speaks = signals.speaks() and sys.stdout.isatty()
            if speaks and ctx.invoked_subcommand in LESSONS:
                from playground.exercises.page import show_steps_after

                show_steps_after(ctx.invoked_subcommand)
            return result

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in {*COMMANDS, *LESSONS_BY_FOLDER}:
            from difflib import get_close_matches  # only where a name is wrong

            from playground.exercises.exercise import CATALOGUE, LIST

            wrong = f"there is no command {args[0]!r}"
            if args[0] in CATALOGUE:
                ctx.fail(f"{wrong}, but an exercise: {LIST} {args[0]}")
            if near := get_close_matches(args[0], self.list_commands(ctx), 1):
                ctx.fail(f"{wrong}: did you mean {near[0]}?")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The path and the tools, in order, from their tables: no command is imported for it."""
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(each.name, say_purpose(each)) for each in section])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = COMMANDS.get(cmd_name) or LESSONS_BY_FOLDER.get(cmd_name)
        if row is None:
            return None
        from playground.ui import session  # not for --help

        session.record_with(RECORDINGS)
        if isinstance(row, tools.Tool):
            command: click.Command = row.command.load()
            return command
        from playground.tools.run.command import lesson_command

        return lesson_command(row)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="playground")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Learn distributed training with PyTorch by running it, from send to FSDP and a mesh of four
    dimensions: chapters whose code runs, exercises judged on real ranks, tools for your own
    scripts. Without a command: where you are, and what comes next.

    \b
        python -m playground hello             four processes find each other
        python -m playground read hello        its chapter
        mkdir -p my && cd my                   solutions are kept in this folder
        python -m playground exercise whoami   the first exercise
    """
    if ctx.invoked_subcommand is None:
        from playground.exercises.page import show_next

        show_next()


def main() -> NoReturn:
    """Run the command line as a program of its own, and end it."""
    process_checks.open_standard_streams()
    process_checks.replace_unencodable()
    if STARTED_BY_OTHERS & os.environ.keys():
        from playground.world.rendezvous.environment import end_with_torchrun, take_slurm_place

        take_slurm_place()
        if STARTED_AS_RANK & os.environ.keys():
            signals.exit_after(GRACE)
            end_with_torchrun()
    try:
        run()
    except KeyboardInterrupt:  # just when the command had come to its end
        leave(INTERRUPTED, "interrupted" if signals.speaks() else "")
    finally:
        if END_SERVERS.module in sys.modules:  # there may be a fork server
            END_SERVERS()


def run() -> NoReturn:
    """Run the command line and exit: 0 done, 2 asked for the impossible, 1 a rank failed, 75
    preempted, 128 + the signal's number if one ended it (Ctrl-C 130, SIGTERM 143, SIGHUP 129, a
    closed pipe for the output 141)."""
    try:
        process_checks.check_working_folder()
        code = cli.main(prog_name="playground", standalone_mode=False) or 0
        sys.stdout.flush()
        leave(code)
    except click.ClickException as error:
        leave(error.exit_code, " ".join(error.format_message().split()))
    except PlaygroundError as error:
        leave(error.exit_code, str(error))
    except (click.Abort, KeyboardInterrupt):
        leave(INTERRUPTED, "interrupted" if signals.speaks() else "")
    except signals.Terminated as error:
        leave(error.code)
    except (UnreadOutput, BrokenPipeError):
        process_checks.discard_output()
        leave(128 + signal.SIGPIPE)
    except OSError as error:
        if not (why := describe_os_error(error)):
            raise
        process_checks.discard_output()
        leave(1, why)


def describe_os_error(error: OSError) -> str:
    """The refusal of the system, in one line; empty if the user cannot mend it."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error.strerror}: raise the limit (ulimit -n), or take fewer ranks"
    if error.filename:
        return f"{error.strerror}: {os.fsdecode(error.filename)}"
    if error.errno in CANNOT_WRITE:
        return f"cannot write to standard output ({error.strerror})"
    return ""


def leave(code: int, why: str = "") -> NoReturn:
    """Say why, and exit. A rank leaves a broken group hard: beside peers that are gone, an orderly
    exit can hang."""
    signals.leave_to_system()
    if why:
        with contextlib.suppress(OSError):  # stderr is closed too
            click.echo(f"playground: {printable(why, lines=True)}", err=True)
    distributed = sys.modules.get("torch.distributed")
    if code and distributed and distributed.is_initialized():
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
