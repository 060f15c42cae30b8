"""What ranks print arrives, whole lines, whatever becomes of the rank."""

from __future__ import annotations

import ctypes
import io
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from fixtures import Run
from hypothesis import given, settings, strategies as st

from playground import RankFailed, RankTimeout, launch
from playground.world.launcher import output as output_module
from playground.world.launcher.output import (
    FIRST_RANK,
    FLOOD_GAP,
    LONGEST_LINE,
    PATIENCE,
    QUIET,
    READ_AT_ONCE,
    REST,
    Output,
    end_lines,
)

LONG = 3 * LONGEST_LINE
LINE = re.compile(r"rank (\d+) line (\d+) x{60}")


def print_lines(rank: int, size: int, count: int, killed: int, hung: int) -> None:
    for number in range(count):
        print(f"rank {rank} line {number} " + "x" * 60)
    dist.barrier()
    if rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == hung:
        time.sleep(1000)
    dist.barrier()


def check_lines(text: str, ranks: int, count: int) -> None:
    found: Counter[str] = Counter()
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        assert match, f"torn: {line}"
        assert int(match[2]) == found[match[1]], "out of order"
        found[match[1]] += 1
    assert found == {str(rank): count for rank in range(ranks)}


def test_lines_of_many_ranks_arrive_whole_though_one_is_killed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 4 was killed by SIGKILL"):
        launch(print_lines, 4, args=(500, 1, 2), timeout=60)
    check_lines(capfd.readouterr().out, 4, 500)


@pytest.mark.stress
def test_lines_of_ranks_that_hang_arrive(capfd: pytest.CaptureFixture[str]) -> None:
    launch(print_lines, 2, args=(0, -1, -1))  # so that ranks are there which need no time to meet
    with pytest.raises(RankTimeout):
        launch(print_lines, 2, args=(20, -1, 1), timeout=1)
    check_lines(capfd.readouterr().out, 2, 20)


IMPORTED = """
import os
import sys
from playground import launch
from terminal import open_terminal

def say(rank, size):
    print("run")

if __name__ == "__main__":
    with open_terminal() as terminal:
        ours = os.dup(1)
        for number in (1, 2):
            os.dup2(terminal.stream.fileno(), number)
        print("imported", flush=True)
        launch(say, 2)
        for number in (1, 2):
            os.dup2(ours, number)
    print(terminal.shown)
else:
    print("imported")
    print("imported", file=sys.stderr)
"""


def test_what_a_script_prints_while_ranks_import_it_says_which_rank(run_script: Run) -> None:
    done = run_script(IMPORTED, TERM="dumb")
    assert (done.code, done.err) == (0, "")
    said = {"imported": 2, "run": 1}
    assert Counter(done.out.split("\n")) == {"imported": 1, "": 2} | {
        f"[rank {rank}] {what}": said[what] for rank in range(2) for what in said
    }


def print_everywhere(rank: int, size: int) -> None:
    print("to stdout", rank)
    print("to stderr", rank, file=sys.stderr)
    os.write(1, b"past Python\n")
    print("without an end", end="")


def test_each_stream_goes_to_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    launch(print_everywhere, 2)
    out, err = capfd.readouterr()
    assert (
        sorted(out.splitlines())
        == ["past Python"] * 2 + ["to stdout 0", "to stdout 1"] + ["without an end"] * 2
    )
    assert sorted(err.splitlines()) == ["to stderr 0", "to stderr 1"]


def close_stdout(rank: int, size: int) -> int:
    print("before it closes")
    sys.stdout.close()
    return rank


def test_a_rank_may_close_its_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(close_stdout, 1) == [0]
    assert capfd.readouterr().out == "before it closes\n"


def print_for_ever(rank: int, size: int) -> None:
    if rank == 0:
        for _ in range(10):  # of which some are whole when the other raises
            print("on and on", flush=True)
    dist.barrier()
    if rank == 1:
        raise ValueError("the error")
    while True:
        print("on and on")


def test_a_rank_that_never_stops_printing_does_not_hold_up_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 failed: ValueError: the error"):
        launch(print_for_ever, 2)
    assert set(capsys.readouterr().out.splitlines()[:-1]) == {"on and on"}


@settings(deadline=None, max_examples=30)
@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))),
    cuts=st.data(),
)
def test_lines_are_whole_however_they_are_cut(lines: list[str], cuts: st.DataObject) -> None:
    written = io.StringIO()
    ours, theirs = Pipe(duplex=False)
    output = Output(0, "stdout", ours)
    left = "".join(f"{line}\n" for line in lines).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", written)
        while left:
            size = cuts.draw(st.integers(1, len(left)))
            os.write(theirs.fileno(), left[:size])
            left = left[size:]
            output.relay()
            assert written.getvalue() == "" or written.getvalue().endswith("\n")
        theirs.close()
        output.relay_all()
    output.pipe.close()
    assert written.getvalue() == "".join(f"{line}\n" for line in lines)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"TERM": "xterm"}, "\033[2m[rank 3] \033[0mone\n\033[2m[rank 3] \033[0mtwo\n"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "[rank 3] one\n[rank 3] two\n"),
    ],
)
def test_on_a_terminal_each_line_says_which_rank(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], shown: str
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    output = Output(3, "stderr", Pipe(duplex=False)[0])
    for part in (b"one\n", b"t", b"wo"):
        output.write(part)
    end_lines()
    assert terminal.getvalue() == shown
    terminal.truncate(0)
    Output(3, "stderr", Pipe(duplex=False)[0]).write(b"one\n")
    end_lines()
    assert terminal.getvalue().count("\n") == 1, "what is ended already is not ended again"


def relayed(parts: list[tuple[int, bytes]]) -> bytes:
    """What is passed on when ranks write these parts, one after the other, before any of them
    ends."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    pipes = {rank: Pipe(duplex=False) for rank, _ in parts}
    outputs = {rank: Output(rank, "stdout", ours) for rank, (ours, _) in pipes.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        for rank, part in parts:
            os.write(pipes[rank][1].fileno(), part)
            outputs[rank].relay()
        shown = stream.buffer.getvalue()
        for output in outputs.values():
            output.relay_all()
        end_lines()
    for ours, theirs in pipes.values():
        ours.close()
        theirs.close()
    assert isinstance(shown, bytes)
    return shown


def test_bytes_are_passed_on_as_they_are() -> None:
    everything = bytes(range(256)) + b"\n"
    assert relayed([(0, everything[:100]), (0, everything[100:])]) == everything


def test_a_bar_moves_and_lines_of_other_ranks_begin_below_it() -> None:
    assert relayed([(0, b"\r 10%")]) == b"\r 10%"
    parts = [
        (0, b"\r 10%"),
        (1, b"li"),
        (0, b"\r 20%"),
        (1, b"ne\n"),
        (0, b"\r 30%"),
        (0, b"\n"),
        (1, b"more\n"),
    ]
    assert relayed(parts) == b"\r 10%\r 20%\nline\n\r 30%\nmore\n"


def test_a_line_without_an_end_is_passed_on_before_it_fills_the_memory() -> None:
    assert relayed([(0, b"x" * READ_AT_ONCE)] * 10) == b""
    assert len(relayed([(0, b"x" * READ_AT_ONCE)] * 17)) == 17 * READ_AT_ONCE


def test_while_a_rank_is_in_a_long_line_no_other_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    pipes = [Pipe(duplex=False) for _ in range(2)]
    first, second = (Output(rank, "stdout", ours) for rank, (ours, _) in enumerate(pipes))

    def write(part: bytes) -> None:
        os.write(pipes[0][1].fileno(), part)
        first.relay()

    for _ in range(17):
        write(b"x" * READ_AT_ONCE)
    now = time.monotonic() + 1
    assert [each.is_read(now) for each in (first, second)] == [True, False]
    write(b"\n")
    assert [each.is_read(now) for each in (first, second)] == [True, True]
    end_lines()
    for each in (each for pair in pipes for each in pair):
        each.close()


def print_long_lines(rank: int, size: int) -> None:
    for _ in range(3):
        print(str(rank) * LONG)
        print("short")


def test_lines_longer_than_what_is_kept_of_one_stay_whole(
    capfd: pytest.CaptureFixture[str],
) -> None:
    launch(print_long_lines, 3)
    lines = Counter(capfd.readouterr().out.splitlines())
    assert lines == {"short": 9} | {str(rank) * LONG: 3 for rank in range(3)}


class Tee:
    """A stream that can do no more than `print` asks of one."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> None:
        self.written += text


def test_a_stream_need_only_be_one_that_can_be_printed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    tee = Tee()
    monkeypatch.setattr(sys, "stdout", tee)
    launch(print_everywhere, 1)
    assert tee.written == "to stdout 0\npast Python\nwithout an end"


def print_before_an_end_that_is_none(rank: int, size: int) -> None:
    os.write(1, b"descriptor, ")
    sys.stdout.buffer.write(b"buffer, ")
    print("text, ", end="")
    ctypes.CDLL(None).printf(b"C, ")
    subprocess.run(["printf", "child"], check=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_is_printed_is_there_at_once_and_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed, match="SIGKILL"):
        launch(print_before_an_end_that_is_none, 1)
    assert capfd.readouterr().out == "descriptor, buffer, text, C, child"


class Parts(io.StringIO):
    """Tells its parts apart."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def write(self, text: str) -> int:
        self.parts.append(text)
        return len(text)


def test_a_part_of_a_line_is_passed_on_when_its_rank_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(output_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(sys, "stdout", parts := Parts())
    ours, theirs = Pipe(duplex=False)
    output = Output(0, "stdout", ours)
    with ours, theirs:
        for arrived, passed, sleeps, is_shown in (
            (b"name? ", QUIET / 2, True, False),  # there may be more
            (b"", QUIET, False, False),  # between two writes
            (b"", QUIET, True, True),
            (b"busy", QUIET * 2, False, False),
            (b"", PATIENCE, False, True),
        ):
            if arrived:
                os.write(theirs.fileno(), arrived)
                output.relay()
            now += passed
            assert output.seconds_left(now) < QUIET
            before = len(parts.parts)
            output.relay_part(partial(bool, sleeps))
            assert (len(parts.parts) > before) == is_shown
    assert parts.parts == ["name? ", "busy"]
    assert output.seconds_left(now) == math.inf


def test_a_pipe_that_is_never_dry_is_read_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(output_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(sys, "stdout", Parts())
    ours, theirs = Pipe(duplex=False)
    output = Output(0, "stdout", ours)
    reads = 0
    with ours, theirs:
        for _ in range(1000):
            os.write(theirs.fileno(), b"a line\n")
            if output.is_read(now):
                output.relay()
                reads += 1
            now += REST / 10
        assert reads < 200
        now += FLOOD_GAP
        for _ in range(10):  # a line now and then is passed on at once
            os.write(theirs.fileno(), b"a line\n")
            assert output.is_read(now)
            output.relay()
            now += FLOOD_GAP


def test_of_the_first_rank_alone_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    for rank in (0, 1):
        Output(rank, "stdout", Pipe(duplex=False)[0], FIRST_RANK).write(b"%d\n" % rank)
    end_lines()
    assert stream.getvalue() == "0\n"


def test_without_a_console_there_is_nothing_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe(duplex=False)
    with ours, theirs, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)  # as of a program that has closed it before Python began
        output = Output(0, "stdout", ours)
        output.write(b"a line\n")
        assert output.end == b"\n"
