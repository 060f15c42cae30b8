"""Threads of ours: neither a program nor the proof of a deadlock sees them."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from playground.base.threads import OurThread, join_our_threads, running
from playground.explain.hang.activity import look


def test_a_program_does_not_see_them() -> None:
    before, may_end = threading.enumerate(), threading.Event()
    thread = OurThread(may_end.wait, name="ours")
    thread.start()
    assert thread.ident in running
    assert threading.enumerate() == before
    may_end.set()
    thread.join()
    assert thread.ident not in running


@pytest.mark.parametrize("kind", [OurThread, threading.Thread])
def test_the_proof_leaves_them_aside_and_no_others(kind: type[OurThread]) -> None:
    may_end = threading.Event()
    before = look()
    thread = kind(target=may_end.wait, name="waits")
    thread.start()
    now = look()
    may_end.set()
    thread.join()
    assert before
    assert now
    expected = before.may_act or ("" if kind is OurThread else "what thread waits does")
    assert now.may_act == expected


def test_they_take_no_signal() -> None:
    """In a process that has no other threads: one would be ended by the signal."""
    code = """
import os, signal, threading
from playground.base.threads import OurThread
OurThread(threading.Event().wait, name="ours", daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
assert signal.sigwait({signal.SIGUSR1}) == signal.SIGUSR1
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_those_that_are_no_daemons_are_waited_for() -> None:
    done, may_end = list[str](), threading.Event()

    def finish() -> None:
        may_end.wait()
        done.append("done")

    OurThread(may_end.wait, name="daemon", daemon=True).start()
    OurThread(finish, name="no daemon").start()
    timer = threading.Timer(0.05, may_end.set)
    timer.start()
    join_our_threads()
    assert done == ["done"]
    timer.join()
