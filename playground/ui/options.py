"""Options: made of the flags of a dataclass and packed into one object; names of a table.

A setting is declared once, as a flag of the dataclass that holds it. The type of its field says
what the option takes:

    steps: int = flag(10, "Number of steps.", least=1)                 --steps 10
    wide: bool = flag(False, "Show all columns.")                      --wide
    grid: tuple[int, int] | None = flag(None, "Mesh.")                 --grid 2 3
    ways: tuple[str, ...] = flag(WAYS, "Ways to compare", choices=…)   --ways ring,tree or all

An option that has no effect is refused by name. What it needs stands with its flag, or beside the
options of a command:

    flag(…, needs={"see": ANY})                                 # --see, whatever its value
    refuse("wide", why=lambda given: "prints no table: leave it out" if given["as_json"] else "")
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from playground.base.errors import UsageError
from playground.base.flags import Flag, flags_of
from playground.ui.option_types import (
    ALL,
    FILE,
    MEGABYTE,
    FlagOrFile,
    Megabytes,
    Names,
    Rank,
    Size,
)


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda command: functools.reduce(
        lambda decorated, each: each(decorated), reversed(decorators), command
    )


def flags(
    kind: type[Any], *names: str, changed: Mapping[str, Mapping[str, Any]] | None = None
) -> Callable[[Any], Any]:
    """Options for these fields of a dataclass or, if none are named, for all flags, as one
    decorator. `changed`: by field, what replaces fields of its flag."""
    known, hints = flags_of(kind), get_type_hints(kind)
    defaults: Mapping[str, Any] = {field.name: field.default for field in fields(kind)}
    made = []
    for name in names or known:
        about = replace(known[name], **(changed or {}).get(name, {}))
        made.append(make_option(name, about, hints[name], defaults[name]))
        made += [refuse_without(name, other, values) for other, values in about.needs.items()]
    return options(*made)


def make_option(name: str, about: Flag, hint: Any, default: Any) -> Callable[[Any], Any]:
    """The option for a field of this type, called `name`."""
    spellings = (about.name or f"--{name.replace('_', '-')}").split()
    if get_origin(hint) is not tuple:  # it may be None
        hint = next((each for each in get_args(hint) if each is not NoneType), hint)
    is_list = get_origin(hint) is tuple and Ellipsis in get_args(hint)
    element = get_args(hint)[0] if is_list else hint
    if is_list and element is str:
        known = about.choices or ()
        return names_option(*spellings, name, known=known, help=about.help, default=default)
    is_shown = hint is not bool and default not in (None, ())
    if about.endings:
        return click.option(
            *spellings, name,
            cls=FlagOrFile, endings=about.endings, type=FILE, is_flag=False, flag_value="-",
            default=default, metavar=f"[FILE{'|'.join(about.endings)}]", help=about.help,
        )  # fmt: skip
    return click.option(
        *spellings,
        name,
        type=type_of(about, element),
        is_flag=hint is bool,
        multiple=is_list,
        default=round(default / MEGABYTE, 4) if about.in_megabytes and default else default,
        show_default=about.shown_default or is_shown,
        metavar=about.metavar,
        help=about.help,
    )


def type_of(flag: Flag, hint: Any) -> Any:
    """The type of an option for click, with the range it allows; None where click's own will do."""
    low = flag.least if flag.above is None else flag.above
    high = flag.most if flag.below is None else flag.below
    if get_origin(hint) is tuple:
        return tuple(type_of(flag, each) for each in get_args(hint))
    if hint is Path:
        return FILE
    if flag.in_megabytes:
        return Megabytes(0, 1e6, min_open=True)
    if flag.is_size:
        return Size()
    if flag.is_rank:
        return Rank(0)
    if flag.choices is not None:
        return click.Choice(tuple(flag.choices), case_sensitive=False)
    if hint is int:
        return click.IntRange(cast("int", low), cast("int", high))
    if hint is float:
        return click.FloatRange(
            low, high, min_open=flag.above is not None, max_open=flag.below is not None
        )
    return None


def pack_options(
    name: str,
    kind: type[Any],
    *names: str,
    changed: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[Any], Any]:
    """The options of `flags`. Their values reach the command as one argument `name`, a `kind`."""
    packed_names = names or tuple(flags_of(kind))

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def with_packed(*args: Any, **values: Any) -> Any:
            packed = kind(**{each: values.pop(each) for each in packed_names})
            return command(*args, **{name: packed}, **values)

        return flags(kind, *names, changed=changed)(with_packed)

    return decorate


def names_option(
    *spellings: str,
    known: Collection[str],
    help: str,
    default: Sequence[str] = (),
    **more: Any,
) -> Callable[[Any], Any]:
    """An option that takes names of a table, with commas between them or each with an option of its
    own, or `ALL`. Its value has them in the order of the table, each once; it is `default` if the
    option is left out. `more`: arguments of `click.option`."""

    def select(
        ctx: click.Context, param: click.Parameter, given: Sequence[Sequence[str]]
    ) -> tuple[str, ...]:
        words = {*chain.from_iterable(given)}
        return tuple(name for name in known if words & {name, ALL})

    about = {
        "help": f"{help}: {', '.join(known)} or {ALL}.",
        "multiple": True,
        "metavar": "NAME,…",
        "default": [ALL] if tuple(default) == tuple(known) else default,
        "show_default": bool(default),
        "type": Names([*known, ALL]),
        "callback": select,
    }
    return click.option(*spellings, **{**about, **more})


def refuse(*names: str, why: Callable[[Mapping[str, Any]], str]) -> Callable[[Any], Any]:
    """A decorator for a command: its options `names` (of parameters) may not be typed where `why`,
    called with the values of all parameters, has an answer. The command then raises `UsageError`
    with it before it begins. Defaults and environment variables are never refused: they were not
    typed for this run."""

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def checked(*args: Any, **kwargs: Any) -> Any:
            ctx = click.get_current_context()
            for param in ctx.command.params:
                typed = (
                    param.name in names
                    and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
                )
                if typed and (answer := why(ctx.params)):
                    raise UsageError(f"{param.opts[0]} {answer}")
            return command(*args, **kwargs)

        return checked

    return decorate


def refuse_without(name: str, other: str, values: tuple[object, ...]) -> Callable[[Any], Any]:
    """A decorator for a command: its option `name` needs the parameter `other` with one of these
    values, or with any (`ANY`)."""

    def why(given: Mapping[str, Any]) -> str:
        value, params = given[other], click.get_current_context().command.params
        if value in values if values else value is not None:
            return ""
        flag = next(param.opts[0] for param in params if param.name == other)
        if value is None:
            return f"has no effect without {flag}: add {flag} or leave it out"
        return (
            f"has no effect with {flag} {value}: it is for {flag} {' or '.join(map(str, values))}"
        )

    return refuse(name, why=why)
