"""What every program can be asked, a script or a lesson: the options of its run, and values for its
constants. Does not import torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from playground.base.constants import Constant, Constants, Value
from playground.base.errors import UsageError
from playground.base.flags import flag, flags_of
from playground.explain.right import CERTAIN, CHECKS
from playground.ui.option_types import FILE
from playground.ui.options import flags, options
from playground.world.launcher.output import EVERY_RANK, FIRST_RANK
from playground.world.launcher.rounds import ROUNDS

NO_LIMIT = 999_999.0
"""Seconds of silence after which a run is ended unless --timeout says so: a program that trains may
say nothing for hours."""
OUTPUTS = (EVERY_RANK, ROUNDS, FIRST_RANK)


@dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """The options of a program's run. Each is an option of `run`, and of every lesson."""

    timeout: float | None = flag(
        None,
        "Seconds after which a run is ended in which no rank prints or reports anything; without "
        "it, only a proved deadlock ends it.",
        above=0,
        below=NO_LIMIT,
    )
    profile: Path | None = flag(
        None,
        "Say what communication costs, by line of the program: calls, bytes sent, time waited, "
        "time hidden. FILE.json gets it as a document, FILE.html as a page.",
        endings=(".json", ".html"),
    )
    link: float | None = flag(
        None,
        "Simulate a link of so many 10^9 bits per second out of each rank, under every call.",
        metavar="GBIT",
        above=0,
    )
    check: str = flag(
        CERTAIN,
        "Tell of silent mistakes in training: what is wrong or probably wrong (certain); also what "
        "is perhaps wrong, and what was looked at (hints); as certain, with exit code 1 if "
        "something is wrong, not if it is only probably wrong (strict); nothing (off).",
        choices=CHECKS,
    )
    debug: int | None = flag(
        None,
        "Answer this rank's breakpoint() and pdb.set_trace() here, while the others wait for it, "
        "however long; they pass theirs by.",
        metavar="RANK",
        least=0,
        is_rank=True,
    )
    output: str | Path = EVERY_RANK
    """The value of `LaunchConfig.output`."""


def program_options(output: str = EVERY_RANK) -> Callable[[Any], Any]:
    """The options of `ProgramOptions`, which reach the command as one argument `asked`. `output`:
    the default of --output."""
    shown = click.option(
        "--output",
        type=click.Choice(OUTPUTS),
        default=output,
        show_default=True,
        help="Whose output is shown: that of all ranks, as it comes, or in rounds (the first lines "
        "of all ranks, then the second, …); or that of rank 0.",
    )
    folder = click.option(
        "--output-dir",
        type=FILE,
        metavar="DIR",
        help="Show no output: write it to DIR, a file for each rank and stream.",
    )

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def with_asked(*args: Any, output: str, output_dir: Path | None, **values: Any) -> Any:
            fields = {name: values.pop(name) for name in flags_of(ProgramOptions)}
            asked = ProgramOptions(**fields, output=output_dir or output)
            return command(*args, asked=asked, **values)

        return options(flags(ProgramOptions), shown, folder)(with_asked)

    return decorate


class Numbers(click.ParamType[tuple[Any, ...]]):
    """Numbers with commas between them, as a tuple."""

    def __init__(self, number: click.ParamType[Any]) -> None:
        self.number = number
        self.name = f"{number.name},…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        return tuple(self.number.convert(each, param, ctx) for each in value.split(","))


class Count(click.types.IntParamType):
    """A whole number that is not negative."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if number >= 0 else self.fail(f"{value} is less than 0.", param, ctx)


COUNT = Count()


def type_of_value(value: Value) -> click.ParamType[Any]:
    """What another value of the same constant has to be."""
    if isinstance(value, bool):
        return click.BOOL
    if isinstance(value, tuple):
        return Numbers(click.INT if all(isinstance(each, int) for each in value) else click.FLOAT)
    if isinstance(value, int):
        return COUNT if value >= 0 else click.INT  # a count, a rank or a seed
    return click.FLOAT if isinstance(value, float) else click.STRING


def text_of_value(value: Value) -> Value:
    """The value as it is typed, if it is a tuple."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def constant_option(constant: Constant) -> Callable[[Any], Any]:
    """The option of a lesson for a constant: `--batch-size` for BATCH_SIZE. Its value reaches the
    command under the constant's name."""
    spelling = constant.name.lower().replace("_", "-")
    is_bool = isinstance(constant.value, bool)
    kind = {} if is_bool else {"type": type_of_value(constant.value)}
    return click.option(
        f"--{spelling}/--no-{spelling}" if is_bool else f"--{spelling}",
        constant.name,
        default=text_of_value(constant.value),
        show_default=True,
        help=constant.comment,
        **kind,  # type: ignore[arg-type]
    )


set_option = click.option(
    "--set",
    "settings_of_constants",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another value for a constant: a name in capitals to which the script assigns a number, a "
    "string, True or False, or a tuple of numbers (1,2,3) at its top level. Repeat it for more.",
)
"""The option of `run` for constants."""


def read_settings(
    settings: Sequence[str], constants: Constants, file: Path
) -> Iterator[tuple[str, Value]]:
    """Names and values of --set. Raises `UsageError` for a constant that the program in `file`
    lacks or computes, and click's error for a value of another type."""
    for setting in settings:
        name, equals, text = setting.partition("=")
        known = constants.literals.get(name)
        if not equals:
            raise UsageError(f"--set {setting}: write NAME=VALUE, as in --set EPOCHS=2")
        if name in constants.computed:
            raise UsageError(
                f"--set {setting}: {file.name}, line {constants.computed[name]}, does not assign "
                f"{name} one literal: only a number, a string, True or False, or a tuple of "
                "numbers can be replaced"
            )
        if known is None:
            advice = advise(name, constants)
            raise UsageError(f"--set {setting}: {file.name} has no constant {name}: {advice}")
        try:
            yield name, type_of_value(known.value).convert(text, None, None)
        except click.BadParameter as error:
            raise click.BadParameter(error.message, param_hint=f"--set {name}") from None


def advise(name: str, constants: Constants) -> str:
    """What to write instead of the name of a constant that is not there."""
    if not constants.literals:
        return "assign it a literal at the top level"
    if close := get_close_matches(name.upper(), constants.literals):
        return f"did you mean {close[0]}?"
    return f"choose one of {', '.join(constants.literals)}"
