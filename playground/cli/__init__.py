"""The command line: parse, check, launch, show. Importing it does not import torch."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

import click

from playground.cli import allreduce, data_parallel, ddp, ladder, prove
from playground.cli.bench import bench_command
from playground.cli.recipe import sync_options
from playground.cli.scale import scale_command
from playground.cli.steps import steps_command
from playground.cli.training import training_command
from playground.lessons import LESSONS, PATH
from playground.runtime import server
from playground.runtime.errors import Impossible, PlaygroundError
from playground.training.files import NoData


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
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
        click.echo("Then read its module in playground/lessons/, and run it again with other options (--help).")
        click.echo("To measure: python -m playground bench, python -m playground scale")


cli.add_command(steps_command(LESSONS["hello"]))
cli.add_command(steps_command(LESSONS["p2p"]))
cli.add_command(steps_command(LESSONS["collectives"]))
cli.add_command(allreduce.command)
cli.add_command(data_parallel.command)
cli.add_command(training_command(LESSONS["sgd"], sync_options))
cli.add_command(ladder.command)
cli.add_command(ddp.command)
cli.add_command(prove.command)
cli.add_command(bench_command)
cli.add_command(scale_command)


def main() -> NoReturn:
    """Run the command line as a program of its own, and end it."""
    try:
        run()
    finally:
        server.dismiss()


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
        leave(Impossible.exit_code, str(error))
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
