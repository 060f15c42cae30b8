"""Options are made of the flags of a dataclass, by the types of its fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from playground.base.flags import flag
from playground.ui.options import flags, names_option, pack_options

TABLE = ("ring", "tree", "auto")


@dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int = flag(10, "Steps.", least=1)
    cap: int | None = flag(None, "Cap.", in_megabytes=True, shown_default="none")
    begin: int = flag(1024, "Smallest size.", name="-b --begin", is_size=True)
    way: str | None = flag(None, "Way.", choices=TABLE)
    ways: tuple[str, ...] = flag(TABLE, "Ways", choices=TABLE)
    only: tuple[str, ...] = flag((), "Run only these", choices=TABLE)
    grid: tuple[int, int] | None = flag(None, "Mesh.", least=1)
    figures: tuple[tuple[str, Path], ...] = flag((), "Files.", name="--figure", choices=TABLE)
    wide: bool = flag(False, "Wide.")


@click.command()
@pack_options("settings", Settings)
@names_option("--lab", known=TABLE, help="Parts", is_flag=False, flag_value="all")
def command(settings: Settings, lab: tuple[str, ...]) -> tuple[Settings, tuple[str, ...]]:
    return settings, lab


def call(*words: str) -> Any:
    return command.main(list(words), standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--cap 0.5", "cap", 2**19),
        ("-b 64k", "begin", 2**16),
        ("--way ring", "way", "ring"),
        ("--ways tree,ring", "ways", ("ring", "tree")),
        ("--ways tree --ways ring", "ways", ("ring", "tree")),
        ("--only all", "only", TABLE),
        ("--grid 2 3", "grid", (2, 3)),
        ("--figure ring a.svg --figure tree b.svg", "figures",
         (("ring", Path("a.svg")), ("tree", Path("b.svg")))),
        ("--wide", "wide", True),
    ],
)  # fmt: skip
def test_the_type_of_a_field_says_what_its_option_takes(
    words: str, field: str, value: object
) -> None:
    settings, lab = call(*words.split())
    assert {**vars(Settings()), field: value} == vars(settings)
    assert lab == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 0", "0 is not in the range x>=1"),
        ("--ways ring,rung", "'rung' is not one of 'ring', 'tree', 'auto', 'all'"),
        ("--ways", "requires an argument"),
        ("--grid 2 0", "0 is not in the range x>=1"),
        ("-b 0", "'0' is no size: write a whole number of bytes above 0"),
        ("-b 4T", "'4T' is no size"),
    ],
)
def test_what_an_option_does_not_take_is_refused(words: str, message: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        call(*words.split())
    assert message in caught.value.format_message()


def test_an_option_without_its_value_has_the_value_that_is_meant() -> None:
    assert call("--lab", "--wide")[1] == TABLE
    assert call("--lab", "tree,ring")[1] == ("ring", "tree")


def test_help_shows_names_and_defaults() -> None:
    shown = " ".join(command.get_help(click.Context(command)).split())
    assert "--ways NAME,… Ways: ring, tree, auto or all. [default: all]" in shown
    assert "--only NAME,… Run only these: ring, tree, auto or all. --" in shown
    assert "[default: (none); 0<x<=1000000.0]" in shown


def test_a_command_may_show_another_default() -> None:
    changed = click.command()(
        flags(Settings, "steps", changed={"steps": {"shown_default": "few"}})(lambda steps: steps)
    )
    assert [param.name for param in changed.params] == ["steps"]
    assert "[default: (few); x>=1]" in changed.get_help(click.Context(changed))
    assert changed.main([], standalone_mode=False) == 10
