"""Options that have an effect only beside another one: given where they have none, they are refused by name.

One line beside the options states each dependency:

    only_with("epochs", train=(True,))                               # --epochs needs --train
    only_with("gather", "plot", train=(False,))                      # --gather and --plot do not go with --train
    only_with("bucket_cap_mb", sync=("bucketed", "overlapped"))      # --bucket-cap-mb needs one of these --sync
    only_with("keep", snapshots=ANY)                                 # --keep needs --snapshots, whatever its value
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from playground.runtime.errors import UsageError


class AnyValue(tuple[object, ...]):
    """Stands for all values that an option may be given."""

    def __contains__(self, value: object) -> bool:
        return value is not None


ANY = AnyValue()


def only_with(*names: str, **condition: tuple[object, ...]) -> Callable[[Any], Any]:
    """A decorator for a command: its options `names` (of parameters) may be typed only if another parameter, the one
    keyword given, has one of these values. Otherwise the command ends with `UsageError` before it begins.

    Defaults and environment variables are never refused: nobody typed them for this run.
    """
    ((other, values),) = condition.items()

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check_effect(click.get_current_context(), names, other, values)
            return command(*args, **kwargs)

        return checked

    return decorate


def check_effect(ctx: click.Context, names: tuple[str, ...], other: str, values: tuple[object, ...]) -> None:
    """Raise `UsageError` for the first option of `names` that was typed although `other` has none of `values`."""
    if ctx.params[other] in values:
        return
    for name in typed_options(ctx):
        if name in names:
            beside = explain(flag_of(ctx, other), ctx.params[other], values)
            raise UsageError(f"{flag_of(ctx, name)} has no effect {beside}")


def explain(flag: str, value: object, values: tuple[object, ...]) -> str:
    """The rest of the refusal: beside what there is no effect, and what to do."""
    if value is False or value is None:
        return f"without {flag}: add {flag} or leave it out"
    if value is True:
        return f"with {flag}: leave one of them out"
    return f"with {flag} {value}: it is for {flag} {' or '.join(map(str, values))}"


def typed_options(ctx: click.Context) -> list[str]:
    """The parameters that were given on the command line, in the order of --help."""
    return [
        param.name
        for param in ctx.command.params
        if param.name and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    ]


def flag_of(ctx: click.Context, name: str) -> str:
    """How a parameter is written on the command line."""
    return next(param.opts[0] for param in ctx.command.params if param.name == name)
