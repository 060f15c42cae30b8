"""What reaches a terminal and what reaches a pipe: widths, colours, characters, and bars."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures import Run
from terminal import Terminal, open_terminal

from playground.ui import terminal
from playground.ui.tables import Column, Table
from playground.ui.terminal import Bar
from playground.ui.text import RANK, Styled, heading, prose

ESCAPE = re.compile(r"\033\[[0-9;?]*[a-zA-Z]")
HEADING = prose(heading("ring"), ": sent by rank ", Styled("3", RANK))


@pytest.fixture(autouse=True)
def _usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides how text looks is up to the test, and not to whoever runs it."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@contextlib.contextmanager
def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal that is stdout and stderr. (Not a fixture: pytest puts its own streams back before
    the test.)"""
    with open_terminal() as opened, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", opened.stream)
        patch.setattr(sys, "stderr", opened.stream)
        yield opened


def test_headings_and_ranks_have_a_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with use_terminal(monkeypatch) as screen:
        terminal.say(HEADING)
    assert screen.shown == "\033[1;36mring\033[0m: sent by rank \033[35m3\033[0m\n"


def test_who_wants_no_colour_gets_no_escape_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with use_terminal(monkeypatch) as screen:
        terminal.say(HEADING)
    assert screen.shown == "ring: sent by rank 3\n"


def test_a_pipe_gets_plain_text_or_colour_if_that_is_forced(
    run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "\033" not in run_cli("scale", "--alpha", "2e-5", "--beta", "1e-9").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\033[1;36m" in run_cli("scale", "--alpha", "2e-5", "--beta", "1e-9").out


@pytest.mark.parametrize(("columns", "expected"), [("100", 100), ("7", 40), ("", 80), ("many", 80)])
def test_the_width_is_that_of_COLUMNS_within_reason(  # noqa: N802
    columns: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())  # no terminal, wherever the tests run
    assert terminal.width() == expected


EVIL = "\x1b]0;owned\x07\x9b2J\r\u202e"


def test_a_stream_that_lacks_characters_gets_others() -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "playground", "mesh", "--help"]
    done = subprocess.run(command, capture_output=True, env=environ)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout


def test_text_of_others_brings_no_escape_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say(
        f"on {EVIL}", prose(heading(EVIL), "\tof\ntwo lines"), Table(Column("host"), rows=[[EVIL]])
    )
    lines = capsys.readouterr().out.splitlines()
    shown = r"\x1b]0;owned\x07\x9b2J\r\u202e"
    assert [line.strip() for line in lines] == [
        f"on {shown}",
        f"{shown}  of",
        "two lines",
        "host",
        shown,
    ]


def test_an_error_that_quotes_a_path_brings_none_either(run_cli: Run, tmp_path: Path) -> None:
    outcome = run_cli("see", tmp_path / EVIL)
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert r"\x1b]0;owned\x07\x9b2J\r\u202e" in outcome.err
    assert outcome.err.rstrip("\n").isprintable()


def test_a_bar_names_its_phase_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with use_terminal(monkeypatch) as screen, Bar() as bar:
        bar(0, {"phase": "measuring 1 MiB", "step": 3, "steps": 4})
        bar(1, {"phase": "what another rank does"})
        bar(0, {"where": "an event about something else"})
        terminal.say("a line", HEADING)
        print("printed by a rank")
    shown = screen.shown
    assert "measuring 1 MiB" in shown
    assert " 75 %" in shown
    assert "another rank" not in shown
    assert "\033[1;36mring\033[0m: sent" in shown
    # the cursor is hidden, and comes back
    assert shown.count("\033[?25l") == shown.count("\033[?25h") == 1
    lines = [ESCAPE.sub("", line).rpartition("\r")[2].strip() for line in shown.splitlines()]
    assert [line for line in lines if line and "%" not in line] == [
        "a line",
        "ring: sent by rank 3",
        "printed by a rank",
    ]


@pytest.mark.parametrize("where", ["pipe", "dumb terminal", "rank that shows nothing"])
def test_no_bar_where_nobody_could_see_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.StringIO()
    with use_terminal(monkeypatch) as screen:
        if where == "pipe":
            monkeypatch.setattr(sys, "stderr", piped)
        if where == "dumb terminal":
            monkeypatch.setenv("TERM", "dumb")
        with Bar(shown=where != "rank that shows nothing") as bar:
            bar.show("drawing digits", 1, 2)
    assert screen.shown == piped.getvalue() == ""


def test_text_that_goes_elsewhere_stays_out_of_the_bar_s_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    piped = io.StringIO()
    with use_terminal(monkeypatch) as screen:
        monkeypatch.setattr(sys, "stdout", piped)
        with Bar() as bar:
            bar.show("training epoch 1 of 2", 1, 2)
            terminal.say("a line")
            print("printed by a rank")
    assert piped.getvalue() == "a line\nprinted by a rank\n"
    assert "a line" not in screen.shown
