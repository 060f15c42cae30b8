"""What is said on stderr, a line each, of failures that training survives."""

from __future__ import annotations

import click

from playground.runtime.errors import PlaygroundError, RankFailed
from playground.runtime.losses import describe_loss
from playground.runtime.rank import Event
from playground.runtime.restarts import OnRestart, describe_restart
from playground.runtime.untrusted import printable


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
