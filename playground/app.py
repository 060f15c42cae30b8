"""The command line put together: each lesson's command, and each tool's. Importing it does not import torch."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

import click

from playground.console.steps import steps_command
from playground.lessons import LESSONS, PATH
from playground.runtime import server
from playground.runtime.errors import PlaygroundError, UsageError
from playground.tools import TOOLS
from playground.training.files import NoData

COMMANDS = [*LESSONS, *TOOLS]


class Commands(click.Group):
    """Imports a command when it is asked for: a run loads one lesson, and not all."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return COMMANDS

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in TOOLS:
            return TOOLS[cmd_name].command.load()
        if lesson := LESSONS.get(cmd_name):
            return lesson.remote("command", "command").load() if lesson.has_command else steps_command(lesson)
        return None


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="playground")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Learn, test and measure distributed data parallelism, one primitive at a time."""
    if ctx.invoked_subcommand is None:
        width = max(len(lesson.name) for lesson in PATH)
        click.echo("The path, in order:\n")
        for number, lesson in enumerate(PATH, 1):
            click.echo(f"  {number}. {lesson.name:{width}}  {lesson.teaches}")
        click.echo(f"\nStart with: python -m playground {PATH[0].name}")
        click.echo("Then read its folder in playground/lessons/, and run it again with other options (--help).")
        click.echo(f"To measure: {', '.join(f'python -m playground {name}' for name in TOOLS)}")


def main() -> NoReturn:
    """Run the command line as a program of its own, and end it."""
    try:
        run()
    finally:
        server.release()


def run() -> NoReturn:
    """Run the command line and exit: 0 done, 2 asked for the impossible, 1 a rank failed, 130 interrupted."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        leave(cli.main(prog_name="playground", standalone_mode=False) or 0)
    except click.ClickException as error:
        leave(error.exit_code, " ".join(error.format_message().split()))
    except PlaygroundError as error:
        leave(error.exit_code, str(error))
    except NoData as error:
        leave(UsageError.exit_code, str(error))
    except (click.Abort, KeyboardInterrupt):
        leave(130, "interrupted")


def leave(code: int, why: str = "") -> NoReturn:
    """Say why, and exit. A rank leaves a broken group hard: beside peers that are gone, an orderly exit can hang."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if why:
        click.echo(f"playground: {why}", err=True)
    distributed = sys.modules.get("torch.distributed")
    if code and distributed and distributed.is_initialized():
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
