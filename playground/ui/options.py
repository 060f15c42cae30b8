"""Options: made of the flags of a dataclass and packed into one object; names of a table; those of
every run.

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
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from playground.base.errors import UsageError
from playground.base.files import NO_LINK, follow_own_links
from playground.base.flags import ANY, Flag, flag, flags_of
from playground.world.backends import BACKENDS
from playground.world.rendezvous.rendezvous import DEFAULT_TIMEOUT, MAX_RANKS

MEGABYTE = 2**20
ALL = "all"


class Megabytes(click.FloatRange):
    """A number of units of 2^20 bytes, as bytes: DistributedDataParallel's bucket_cap_mb counts
    them so, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return max(1, int(super().convert(value, param, ctx) * MEGABYTE))


class Size(click.ParamType[int]):
    """A number of bytes, written with or without K, M or G."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d{1,18})([KMG]?)", str(value).strip(), re.ASCII | re.IGNORECASE)
        if not match or not int(match[1]):
            about = "write a whole number of bytes above 0, or one with K, M or G, as 64K"
            self.fail(f"{value!r} is no size: {about}", param, ctx)
        return int(match[1]) << 10 * " KMG".index(match[2].upper() or " ")


class Names(click.Choice[str]):
    """Names of a table, with commas between them, as a tuple."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return tuple(super(Names, self).convert(each, param, ctx) for each in value.split(","))


class FileOrFolder(click.Path):
    """A path. No path, as of a shell's variable that is not set, is refused: it would be the
    working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty.", param, ctx)
        return super().convert(value, param, ctx)


FILE = FileOrFolder(path_type=Path)


class FlagOrFile(click.Option):
    """An option that is a flag, or is followed by a file with one of these endings: what follows
    otherwise is no part of it. (click would take the next word, whatever it is.) As a flag, its
    value is the path `-`."""

    def __init__(self, *args: Any, endings: Collection[str], **more: Any) -> None:
        super().__init__(*args, **more)
        self.endings = tuple(endings)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        for spelling in self.opts:
            option = parser._long_opt[spelling]
            option.process = functools.partial(self.process_next, option.process)

    def process_next(self, store: Callable[[str, Any], None], value: Any, state: Any) -> None:
        if isinstance(value, str) and not value.endswith(self.endings):
            state.rargs.insert(0, value)
            value = self.flag_value
        store(value, state)


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda command: functools.reduce(
        lambda decorated, each: each(decorated), reversed(decorators), command
    )


def flags(
    kind: type[Any], *names: str, shown: Mapping[str, str] | None = None
) -> Callable[[Any], Any]:
    """Options for these fields of a dataclass or, if none are named, for all flags, as one
    decorator. `shown`: by field, the default that --help shows, in place of the flag's."""
    known, hints = flags_of(kind), get_type_hints(kind)
    defaults: Mapping[str, Any] = {field.name: field.default for field in fields(kind)}
    made = []
    for name in names or known:
        about = known[name]
        if shown and name in shown:
            about = replace(about, shown_default=shown[name])
        made.append(make_option(name, about, hints[name], defaults[name]))
        made += [only_with(name, **{other: values}) for other, values in about.needs.items()]
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


class OneOf(click.Choice[str]):
    """One of many names. A name that is like one of them is answered with that, not with all."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in self.choices:
            return super().convert(value, param, ctx)
        from difflib import get_close_matches  # only where a name is wrong

        if near := get_close_matches(value, self.choices, 1):
            self.fail(f"there is no {value!r}: did you mean {near[0]}?", param, ctx)
        return super().convert(value, param, ctx)


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
    name: str, kind: type[Any], *names: str, shown: Mapping[str, str] | None = None
) -> Callable[[Any], Any]:
    """The options of `flags`. Their values reach the command as one argument `name`, a `kind`."""
    packed_names = names or tuple(flags_of(kind))

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def with_packed(*args: Any, **values: Any) -> Any:
            packed = kind(**{each: values.pop(each) for each in packed_names})
            return command(*args, **{name: packed}, **values)

        return flags(kind, *names, shown=shown)(with_packed)

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


def only_with(name: str, **condition: tuple[object, ...]) -> Callable[[Any], Any]:
    """The option `name` needs another parameter, the one keyword given, with one of these values,
    or with any (`ANY`)."""
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

    return refuse(name, why=why)


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
    gpus: int | None = flag(
        None,
        "Simulate so many GPUs, on a machine that has none: nccl and CUDA work, computed by the "
        "CPU. Whatever is measured says nothing of a GPU's speed.",
        least=1,
        most=64,
    )
    gpu_memory: int | None = flag(
        None,
        "Memory of each simulated GPU, as 80G. What does not fit raises OutOfMemoryError.",
        is_size=True,
        shown_default="4G",
        needs={"gpus": ANY},
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
        "in words, .json is a trace for Perfetto, .playground keeps the recording for `see`.",
        metavar="FILE",
    )


COMMON = ("size", "backend", "timeout", "wide", "as_json", "see")
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
    "Training": ("batch_size",),
    "Ranks": ("size", "backend", "gpus", "gpu_memory", "timeout", "seed", "restarts"),
    "Data": ("dataset", "limit"),
    "Output": ("wide", "as_json", "output", "output_dir", "see", "plot", "--help"),
}
"""Options that several commands have, under their headings in --help."""


SIZES = "--ranks", "--size", "--processes", "--nproc", "--nproc-per-node", "--np", "--nprocs"
MEANT = {"--record": "--see", **dict.fromkeys(SIZES, "-n")}
"""Names under which options are looked for; those of other programs for the number of ranks."""
PARSES_ALL = re.compile(r"\b(HfArgumentParser|fire|hydra|simple_parsing|tyro)\b")
"""In the text of a script whose options need not stand there."""


def find_misplaced(command: click.Command, words: Sequence[str], text: str) -> str:
    """The first option of this command among the arguments `words` of a script whose text does not
    have its name; empty if there is none."""
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for name in (word.partition("=")[0] for word in words):
        is_ours = name.startswith("--") and name in known and not PARSES_ALL.search(text)
        if is_ours and not re.search(name.strip("-").replace("-", "[-_]"), text):
            return name
    return ""


def tell_misplaced(script: str, words: Sequence[str], text: str) -> None:
    """Say which option of the command that runs stands after the name of the script."""
    command = click.get_current_context().command
    if name := find_misplaced(command, words, text):
        said = f"{name} stands after {script}, so the script gets it: options of {command.name}"
        click.echo(f"playground: {said} stand before the script", err=True)


class Command(click.Command):
    """A command whose --help has its own options first, then those of `HEADINGS`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meant = MEANT.get(error.option_name)
            for param in self.get_params(ctx):
                if meant in param.opts:
                    names = ", ".join(map(repr, param.opts))
                    # as a message: click leaves out names that are not spelled alike
                    message = f"{error.message} Did you mean {names}?"
                    raise click.NoSuchOption(error.option_name, message, ctx=ctx) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = {
            "--help" if "--help" in param.opts else param.name: param
            for param in self.get_params(ctx)
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


class Group(Command, click.Group):
    """The same, and then its subcommands."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)
