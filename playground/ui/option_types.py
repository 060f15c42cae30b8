"""What may follow an option: types for click."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from playground.base.errors import UsageError

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


class Rank(click.IntRange):
    """The number of a rank."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if param and not re.fullmatch(r"\s*[+-]?\d+\s*", text := str(value)):
            script = f" {text}" if text.endswith(".py") else ""
            raise UsageError(f"{param.opts[0]} needs a rank, as in {param.opts[0]} 0{script}")
        return int(super().convert(value, param, ctx))


class Names(click.Choice[str]):
    """Names of a table, with commas between them, as a tuple."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return tuple(super(Names, self).convert(each, param, ctx) for each in value.split(","))


class OneOf(click.Choice[str]):
    """One of many names. A name that is like one of them is answered with that, not with all; any
    other with the command that lists them, if there is one. `aliases`: other names for some."""

    def __init__(
        self,
        names: Sequence[str],
        aliases: Mapping[str, str] | None = None,
        listed_by: str = "",
    ) -> None:
        super().__init__(names)
        self.aliases = aliases or {}
        self.listed_by = listed_by

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        value = self.aliases.get(value, value)
        if value in self.choices:
            return super().convert(value, param, ctx)
        from difflib import get_close_matches  # only where a name is wrong

        if near := get_close_matches(value, self.choices, 1):
            self.fail(f"there is no {value!r}: did you mean {near[0]}?", param, ctx)
        if self.listed_by:
            self.fail(f"there is no {value!r}: `{self.listed_by}` lists the names", param, ctx)
        return super().convert(value, param, ctx)


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
