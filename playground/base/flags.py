"""Settings declared once: default, help, and the values a field may have. Commands make options of
these declarations, and settings check themselves by them, in one form of words. Imports neither
torch nor click."""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from playground.base.errors import UsageError

ANY = ()
"""Any value but None."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A field of a dataclass, as the option that fills it."""

    help: str
    name: str = ""
    """Spelling of the option, if the field has another name. Several spellings have a space between
    them."""
    choices: Collection[str] | None = None
    """The values; of a field that is a tuple, those of its elements: the option takes several of
    them, or "all"."""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    """The exclusive lower bound, in place of `least`."""
    below: float | None = None
    """The exclusive upper bound, in place of `most`."""
    in_megabytes: bool = False
    """Whether the field counts in bytes what the option counts in units of 2^20 bytes."""
    is_size: bool = False
    """Whether the option takes a number of bytes with or without K, M or G."""
    is_rank: bool = False
    """Whether the option takes the number of a rank."""
    shown_default: str = ""
    """What --help shows as the default, where that is not the field's."""
    metavar: str | None = None
    endings: Collection[str] = ()
    """Of an option that is a flag, or is followed by a file: the endings by which such a file is
    known. Without a file, its value is the path `-`."""
    needs: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """By field: values with which the option has an effect; `ANY` but None."""

    def check(self, name: str, value: float) -> None:
        """Raise `UsageError` unless the value of the field `name` is finite and not out of
        bounds. Without any, it may be any number."""
        compared = (
            ("at least", self.least, operator.ge), ("above", self.above, operator.gt),
            ("at most", self.most, operator.le), ("below", self.below, operator.lt),
        )  # fmt: skip
        bounds = {
            f"{words} {bound}": fits(value, bound)
            for words, bound, fits in compared
            if bound is not None
        }
        if not bounds or (all(bounds.values()) and value <= sys.float_info.max):
            return
        must_be = " and ".join(bounds)
        if self.least is not None and self.most is not None:
            must_be = f"between {self.least} and {self.most}"
        elif self.least == 0 and self.below is None:
            must_be = "a finite number, 0 or above"
        raise UsageError(f"{name} {value}: it must be {must_be}")


def flag(default: Any, help: str, **about: Any) -> Any:
    """A field of a dataclass with this default, and a `Flag` of these fields."""
    return field(default=default, metadata={"flag": Flag(help=help, **about)})


def like(kind: type, name: str, default: Any = MISSING, **changes: Any) -> Any:
    """The flag of another dataclass, with its default unless another is given."""
    default = getattr(kind, name) if default is MISSING else default
    return field(default=default, metadata={"flag": replace(flags_of(kind)[name], **changes)})


def flags_of(kind: Any) -> dict[str, Flag]:
    """The flags of a dataclass, by field, in order."""
    return {each.name: each.metadata["flag"] for each in fields(kind) if "flag" in each.metadata}


def check_flags(settings: Any) -> None:
    """Raise `UsageError` unless the fields of `settings` have values that their flags allow, or
    None."""
    for name, flag in flags_of(settings).items():
        value = getattr(settings, name)
        if flag.choices is not None and isinstance(value, tuple):
            for each in value:
                check_choice((flag.name or name).removeprefix("--"), each, flag.choices)
        elif flag.choices is not None and value is not None:
            check_choice(name, value, flag.choices)
        elif isinstance(value, int | float):
            flag.check(name, value)


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise `UsageError` unless `value` is one of `choices`."""
    if value not in choices:
        raise UsageError(f"{name} {value!r} is unknown: choose one of {', '.join(choices)}")
