"""Options: made of the flags of a dataclass and packed into one object; names of a table; those of
every run.

A setting is declared once, as a flag of the dataclass that holds it. `click.option` is for what is
none: which part of a command runs, where something is written, words that the command reads.

An option that has no effect is refused by name. What it needs stands with its flag, or beside the
options of a command:

    flag(…, needs={"sync": ("bucketed", "overlapped")})         # one of these --sync
    flag(…, needs={"snapshots": ANY})                           # --snapshots, whatever its value
    refuse("wide", why=lambda given: "prints no table: leave it out" if given["as_json"] else "")
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_type_hints

import click
from click.core import ParameterSource

from playground.runtime.backends import BACKENDS
from playground.runtime.errors import UsageError
from playground.runtime.files import NO_LINK, follow_own_links
from playground.runtime.flags import Flag, flag, flags_of
from playground.runtime.launcher.launch import MAX_RANKS
from playground.runtime.rendezvous.rendezvous import DEFAULT_TIMEOUT

MEGABYTE = 2**20
Changes = Mapping[str, Mapping[str, Any]]
"""Arguments of `click.option`, by field."""


class Megabytes(click.FloatRange):
    """A number of units of 2^20 bytes, as bytes: DistributedDataParallel's bucket_cap_mb counts
    them so, too."""

    def __init__(self) -> None:
        super().__init__(0, 1e6, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return max(1, int(super().convert(value, param, ctx) * MEGABYTE))


class FileOrFolder(click.Path):
    """A path. No path, as of a shell's variable that is not set, is refused: it would be the
    working folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return (
            super().convert(value, param, ctx)
            if value != ""
            else self.fail("the path is empty.", param, ctx)
        )


FILE = FileOrFolder()


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda command: functools.reduce(
        lambda decorated, each: each(decorated), reversed(decorators), command
    )


def flags(
    kind: type[Any], *names: str, group: str = "", changes: Changes | None = None
) -> Callable[[Any], Any]:
    """Options for these fields of a dataclass or, if none are named, for all flags of the group, as
    one decorator. `changes`: by field, arguments of `click.option` that differ from what the flag
    says."""
    known, hints = flags_of(kind), get_type_hints(kind)
    defaults: Mapping[str, Any] = {field.name: field.default for field in fields(kind)}
    made = []
    for name in names or [name for name in known if known[name].group == group]:
        about, hint = known[name], hints[name]
        value_type = next((each for each in get_args(hint) if each is not NoneType), hint)
        spellings = (about.name or f"--{name.replace('_', '-')}").split()
        arguments = {
            "help": about.help,
            "metavar": about.metavar,
            "type": type_of(about, value_type),
        }
        if about.one_or_all:
            arguments |= one_or_all(about.choices or ())
        elif value_type is bool:
            arguments["is_flag"] = True
        elif defaults[name] not in (None, ()):
            default = round(defaults[name] / MEGABYTE, 4) if about.in_megabytes else defaults[name]
            arguments |= {"default": default, "show_default": True}
        made.append(
            click.option(
                *spellings,
                name,
                **{**arguments, **(about.click or {}), **(changes or {}).get(name, {})},
            )
        )
        made += [only_with(name, **{other: values}) for other, values in about.needs.items()]
    return options(*made)


def type_of(flag: Flag, value_type: type) -> Any:
    """The type of an option for click, with the range it allows; None where click's own will do."""
    low = flag.least if flag.above is None else flag.above
    high = flag.most if flag.below is None else flag.below
    if flag.in_megabytes:
        return Megabytes()
    if flag.choices is not None:
        return click.Choice(tuple(flag.choices))
    if value_type is int:
        return click.IntRange(cast("int", low), cast("int", high))
    if value_type is float:
        return click.FloatRange(
            low, high, min_open=flag.above is not None, max_open=flag.below is not None
        )
    return FILE if value_type is Path else None


def one_or_all(known: Collection[str]) -> Mapping[str, object]:
    """Arguments of `click.option`: it takes a name or `ALL`, and its value is a tuple of names."""
    return {
        "type": click.Choice([*known, ALL]),
        "default": ALL,
        "show_default": True,
        "callback": lambda ctx, param, name: select_names(known, (name,)),
    }


def pack_options(
    name: str,
    kind: type[Any],
    *decorators: Callable[[Any], Any],
    only: Sequence[str] = (),
    changes: Changes | None = None,
) -> Callable[[Any], Any]:
    """The flags of a dataclass, or `only` these, then further options, as one decorator. Their
    values reach the command as its argument `name`: a `kind`, whose fields are called as the
    options' values are."""
    names = only or [field.name for field in fields(kind)]

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def with_packed(*args: Any, **values: Any) -> Any:
            packed = kind(**{each: values.pop(each) for each in names if each in values})
            return command(*args, **{name: packed}, **values)

        return options(flags(kind, *only, changes=changes), *decorators)(with_packed)

    return decorate


ALL = "all"


def names_option(
    *flags: str, known: Collection[str], default: Sequence[str], help: str
) -> Callable[[Any], Any]:
    """An option that takes several names of a table, with commas between them, or `ALL`. Its value
    is the words given; empty if it is left out, for which --help shows `default`. `select_names`
    makes names of the words."""
    return click.option(
        *flags,
        help=f"{help}: {', '.join(known)} or {ALL}.",
        multiple=True,
        metavar="NAME,…",
        show_default=",".join(default),
        callback=lambda ctx, param, texts: read_names(known, texts),
    )


def read_names(known: Collection[str], texts: Iterable[str]) -> tuple[str, ...]:
    """The words of texts with commas in them. Raises `click.BadParameter` for one that is no name
    of the table."""
    words = tuple(word.strip() for text in texts for word in text.split(","))
    for word in words:
        if word not in (*known, ALL):
            raise click.BadParameter(f"{word!r} is none of {', '.join(known)}, {ALL}.")
    return words


def select_names(known: Collection[str], words: Sequence[str]) -> tuple[str, ...]:
    """The names in `known` that `words` ask for, in the order of `known`, each once."""
    return tuple(name for name in known if name in words or ALL in words)


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


def only_with(*names: str, **condition: tuple[object, ...]) -> Callable[[Any], Any]:
    """Options that need another parameter, the one keyword given, with one of these values, or with
    any (`ANY`)."""
    ((other, values),) = condition.items()

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

    return refuse(*names, why=why)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How many ranks a command runs on, how they meet, and how it shows its results."""

    size: int | None = flag(
        None, "Number of ranks.", least=1, most=MAX_RANKS, name="-n --world-size"
    )
    backend: str = flag(
        "gloo",
        f"{'; '.join(f'{backend.name}: {backend.summary}' for backend in BACKENDS.values())}.",
        choices=BACKENDS,
    )
    timeout: float = flag(
        DEFAULT_TIMEOUT,
        "Seconds after which a run is ended in which no rank gives a sign of life.",
        above=0,
        below=1e6,
    )
    seed: int = flag(1234, "Seed of the random number generators.", least=0, most=2**32)
    wide: bool = flag(
        False,
        "Show all steps and all columns of every table, even if lines get wider than the terminal.",
    )
    as_json: bool = flag(False, "Print one JSON document instead of text.", name="--json")
    see: Path | None = flag(
        None,
        "Record what the ranks do, and render it: .html plays it, .svg is a picture, .txt says it "
        "in words, "
        ".json is a trace for Perfetto, .playground keeps the recording for `see`.",
        metavar="FILE",
    )


COMMON = ("size", "backend", "timeout", "seed", "wide", "as_json", "see")
"""The options of nearly every run: fields of `RunOptions`."""


def check_writable(flag: str, file: Path) -> None:
    """Raise `UsageError` if `file`, the value of the option `flag`, could not be written now. It
    stays as it is."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{flag} {file}: there is no such folder as {folder}, create it first")
    try:
        target = follow_own_links(file)
        is_new = not target.exists()
        if is_new or not target.is_fifo():  # opening a FIFO would wait for its reader
            os.close(os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK, 0o666))
    except OSError as error:
        raise UsageError(f"{flag} {file} cannot be written: {error.strerror}") from None
    if is_new:
        target.unlink(missing_ok=True)


HEADINGS = {
    "Training": (
        "epochs",
        "batch_size",
        "lr",
        "momentum",
        "accumulate",
        "loader",
    ),
    "Ranks": ("size", "backend", "timeout", "seed"),
    "Data": ("dataset", "data_dir", "limit"),
    "Snapshots": ("snapshots", "snapshot_every", "restarts"),
    "Output": ("wide", "as_json", "see", "plot", "--help"),
}
"""Options that several commands have, under their headings in --help."""


def format_options(
    command: click.Command, ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    """Write the command's own options first, then those of `HEADINGS`."""
    params = {
        "--help" if "--help" in param.opts else param.name: param
        for param in command.get_params(ctx)
    }
    records = {
        name: record for name, param in params.items() if (record := param.get_help_record(ctx))
    }
    shared = {name for names in HEADINGS.values() for name in names}
    own = {"Options": [name for name in records if name not in shared]}
    for heading, names in {**own, **HEADINGS}.items():
        if rows := [records[name] for name in records if name in names]:
            with formatter.section(heading):
                formatter.write_dl(rows)
