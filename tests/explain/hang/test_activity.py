"""Whether a process goes on: two looks at its threads and sockets, compared."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from playground.explain.hang.activity import (
    Activity,
    compare,
    find_libraries,
    read_call,
    waits_for_interpreter,
)
from playground.explain.hang.idle import Sleep


def test_data_is_under_way_if_either_look_has_seen_it() -> None:
    quiet = Activity(may_act="", in_flight=False, runnable=frozenset(), transferred=(), ticks=())
    for changed in ({"in_flight": True}, {"transferred": ([1, 2],)}):
        busy = replace(quiet, **changed)
        assert [compare(*looks) for looks in ((busy, quiet), (quiet, busy))] == [("", True)] * 2
    acts = replace(quiet, may_act="what it does")
    assert [compare(*looks) for looks in ((acts, quiet), (quiet, acts))] == [
        ("what it does", False)
    ] * 2
    assert compare(quiet, quiet) == ("", False)
    assert compare(quiet, replace(quiet, ticks=(b"1/0",))) == ("what its threads compute", False)
    awake = replace(quiet, asleep=frozenset({Sleep(thread=1, switches=("2",))}))
    assert compare(awake, quiet) == ("what its threads compute", False)
    runs = replace(quiet, runnable=frozenset({"7"}))
    assert compare(runs, runs) == ("", True)
    assert [compare(runs, quiet), compare(quiet, runs)] == [("", False)] * 2, "it has slept"
    assert compare(None, quiet).moves
    assert compare(quiet, None).moves


def test_only_code_of_a_library_counts_as_being_in_it() -> None:
    """Not its data, of which a stack has many addresses."""
    areas = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    firsts = {
        "x" in rights: int(area.partition("-")[0], 16)
        for area, rights, *_, name in areas
        if "/libc.so" in name or "/libc-" in name
    }
    assert find_libraries({firsts[False]}) == set()
    assert [name[:4] for name in find_libraries({firsts[True]})] == ["libc"]


@pytest.fixture
def patient() -> Iterator[None]:
    """No thread that waits for the interpreter's lock asks for it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("patient")
def test_who_waits_for_the_interpreter_s_lock_is_told_from_who_sleeps() -> None:
    """A thread that holds the lock looks at one that wants it, and at one that waits for an
    event."""
    main, content, done = threading.get_native_id(), ctypes.create_string_buffer(200), []
    event = threading.Event()
    sleeper = threading.Thread(target=event.wait, daemon=True)
    sleeper.start()

    def hold() -> None:
        library, call = ctypes.PyDLL(None), os.open(f"/proc/self/task/{main}/syscall", os.O_RDONLY)
        library.usleep(100_000)
        library.read(call, content, 199)
        os.close(call)
        done.append(True)

    threading.Thread(target=hold).start()
    while not done:
        time.sleep(0.001)
    assert waits_for_interpreter(content.value.decode().split())
    assert not waits_for_interpreter(read_call(str(sleeper.native_id)))
    assert not waits_for_interpreter([])
    event.set()
