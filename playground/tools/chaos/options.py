"""Options of `chaos`, and the command it is given: one that trains and takes snapshots."""

from __future__ import annotations

import click

from playground.console.dependent_options import flag_of, typed_options
from playground.console.options import options, pack_options, seed_option
from playground.console.snapshot_options import MAX_RESTARTS
from playground.runtime.errors import UsageError
from playground.tools.chaos.settings import WHOM, ChaosSettings

SETS_ITSELF = ("snapshots", "restarts", "resume")
"""Parameters of a command that `chaos` needs for itself."""
SAYS_ITSELF = ("wide", "as_json")
"""Parameters that say how to print results, which nobody would see."""

chaos_options = pack_options(
    "settings", ChaosSettings,
    click.option(
        "--kills", type=click.IntRange(1, MAX_RESTARTS), default=ChaosSettings.kills, show_default=True, metavar="K",
        help="Number of processes to kill.",
    ),
    click.option(
        "--whom", type=click.Choice(tuple(WHOM)), default=ChaosSettings.whom, show_default=True,
        help="Whom to kill: ranks; the launcher, whose command is then started again; or any process.",
    ),
    options(
        seed_option,
        click.argument("words", metavar="-- COMMAND [OPTIONS]", nargs=-1, required=True, type=click.UNPROCESSED),
    ),
)  # fmt: skip


def check_command(words: tuple[str, ...]) -> str:
    """Return the backend that the command asks for.

    Raise `UsageError` for a command that takes no snapshots, or has options that `chaos` sets itself, and
    `click.UsageError` for options it does not know.
    """
    name, *rest = words
    if not (command := find_trainer(name)):
        known = ", ".join(filter(find_trainer, all_commands().list_commands(click.get_current_context())))
        raise UsageError(f"chaos kills commands that train and take snapshots, and {name} is none: take {known}")
    ctx = command.make_context(name, rest)
    for parameter in typed_options(ctx):
        if parameter in SETS_ITSELF:
            raise UsageError(f"chaos sets {flag_of(ctx, parameter)} of {name} itself: leave it out")
        if parameter in SAYS_ITSELF:
            raise UsageError(f"chaos does not show what {name} prints: put {flag_of(ctx, parameter)} before --")
    return str(ctx.params["backend"])


def find_trainer(name: str) -> click.Command | None:
    """The command of this name, if it can be started anew after a failure and go on."""
    command = all_commands().get_command(click.get_current_context(), name)
    return command if command and {*SETS_ITSELF} <= {param.name for param in command.params} else None


def all_commands() -> click.Group:
    """The group that `chaos` itself is one of."""
    group = click.get_current_context().find_root().command
    assert isinstance(group, click.Group)
    return group
