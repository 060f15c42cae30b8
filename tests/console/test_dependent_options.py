"""Options that have no effect are refused by name, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import pytest

from playground.console.options import only_with
from playground.runtime import UsageError
from playground.runtime.flags import ANY

Run = Callable[..., Any]


@click.command()
@click.option("--snapshots")
@click.option("--sync", default="flat")
@click.option("-k", "--keep", default=1, envvar="KEEP")
@click.option("--cap", default=25)
@only_with("keep", snapshots=ANY)
@only_with("cap", sync=("bucketed", "overlapped"))
def command(**values: object) -> dict[str, object]:
    return values


def call(*words: str) -> Any:
    return command.main(list(words), standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-k", "1"], "-k has no effect without --snapshots: add --snapshots or leave it out"),
        (["--cap", "25"], "--cap has no effect with --sync flat: it is for --sync bucketed or overlapped"),
    ],
)
def test_an_option_without_effect_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        call(*words)
    assert str(caught.value) == message


@pytest.mark.parametrize("words", [[], ["--snapshots", "x", "-k", "2"], ["--cap", "3", "--sync", "bucketed"]])
def test_an_option_with_an_effect_is_taken(words: list[str]) -> None:
    assert call(*words).keys() == {"snapshots", "sync", "keep", "cap"}


def test_what_nobody_typed_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEP", "7")
    assert call()["keep"] == 7


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("sgd", "--bucket-cap-mb", "25"), "--bucket-cap-mb"),
        (("sgd", "--sync", "flat", "--sync-every", "1"), "--sync-every"),
    ],
    ids=" ".join,
)
def test_the_commands_say_what_has_no_effect(words: tuple[str, ...], option: str, run_cli: Run) -> None:
    shown = run_cli(*words)
    assert (shown.code, shown.out) == (2, "")
    assert shown.err.startswith(f"playground: {option} has no effect with")
    assert shown.err.count("\n") == 1
