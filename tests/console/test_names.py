"""Lists of names on the command line: as they are read, and as the shell completes them."""

from __future__ import annotations

import click
import pytest
from click.shell_completion import ShellComplete

from playground.console.options import names_option

KNOWN = ("all_reduce", "all_gather", "broadcast")


@click.command()
@names_option("--collective", "names", known=KNOWN, default=("all_reduce",), help="Collectives")
def command(names: tuple[str, ...]) -> None:
    click.echo(" ".join(names))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", ["all_reduce", "all_gather", "broadcast", "all"]),
        ("b", ["broadcast"]),
        ("broadcast,all_", ["broadcast,all_reduce", "broadcast,all_gather"]),
        ("all_reduce,all_", ["all_reduce,all_gather"]),
        ("x", []),
    ],
)
def test_each_name_of_a_list_is_completed(typed: str, offered: list[str]) -> None:
    complete = ShellComplete(command, {}, "command", "_COMPLETE")
    assert [item.value for item in complete.get_completions(["--collective"], typed)] == offered
