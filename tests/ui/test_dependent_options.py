"""Options that have no effect are refused by name, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import pytest

from playground.base.flags import ANY
from playground.ui.options import refuse, refuse_without
from playground.world import UsageError


@click.command()
@click.option("--snapshots")
@click.option("--sync", default="flat")
@click.option("-k", "--keep", default=1, envvar="KEEP")
@click.option("--cap", default=25)
@refuse_without("keep", "snapshots", ANY)
@refuse_without("cap", "sync", ("bucketed", "overlapped"))
@refuse("sync", why=lambda given: "is for few" if given["cap"] > 99 else "")
def command(**values: object) -> dict[str, object]:
    return values


def call(*words: str) -> Any:
    return command.main(list(words), standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-k", "1"], "-k has no effect without --snapshots: add --snapshots or leave it out"),
        (["--sync", "bucketed", "--cap", "100"], "--sync is for few"),
        (
            ["--cap", "25"],
            "--cap has no effect with --sync flat: it is for --sync bucketed or overlapped",
        ),
    ],
)
def test_an_option_without_effect_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        call(*words)
    assert str(caught.value) == message


def test_commands_say_what_has_no_effect(run_cli: Callable[..., Any]) -> None:
    shown = run_cli("bench", "steps", "--model", "bert", "--dataset", "digits")
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert shown.err.startswith("playground: --dataset has no effect with")


def test_what_nobody_typed_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEP", "7")
    assert call()["keep"] == 7
