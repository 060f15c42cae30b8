"""SIGTERM and SIGHUP in a world that somebody else started: a rank ends at once, wherever it
stands."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from fixtures import Fork
from processes import ENOUGH, by_hand, free_port, session_ends


def test_a_rank_that_waits_for_the_others_to_come_can_be_ended(fork_program: Fork) -> None:
    # no store: the rank waits for its answer, inside torch
    with socket.create_server(("127.0.0.1", 0)) as silent:
        alone = fork_program("joined_rank", "wait", **by_hand(1, 2, str(silent.getsockname()[1])))
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            alone.send_signal(signal.SIGHUP)
            assert alone.communicate(timeout=ENOUGH) == ("", "")
    assert alone.returncode == 128 + signal.SIGHUP


def test_a_rank_that_waits_in_gloo_can_be_ended(fork_program: Fork) -> None:
    port = free_port()
    second, first = (
        fork_program("joined_rank", "stop", 1, **by_hand(rank, 2, port)) for rank in (1, 0)
    )
    assert second.stdout.readline() == "now\n"
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=ENOUGH) == 128 + signal.SIGTERM


def test_a_signal_to_a_child_of_a_rank_is_not_heard_by_the_rank() -> None:
    words = """
import os, signal, time
from playground.base import signals
signals.exit_after(0.1)
signals.handle_termination()
ready, begun = os.pipe()
child = os.fork()
if child == 0:
    try:
        os.write(begun, b"!")
        while True:  # a signal that comes just before a long sleep would be heard at its end
            time.sleep(0.01)
    finally:
        os._exit(0)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
os.waitpid(child, 0)
print(signals.stopping.wait(0.3))
"""
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, timeout=ENOUGH, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False\n")


LIKE_TORCHRUN = """
import os, time
from playground.world.rendezvous.environment import end_with_torchrun
ready, begun = os.pipe()
if os.fork() == 0:
    end_with_torchrun()
    os.write(begun, b"!")
    time.sleep(1000)
os.read(ready, 1)
os._exit(0)
"""


def test_ranks_end_with_what_has_started_them() -> None:
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    agent = subprocess.Popen(
        [sys.executable, "-c", LIKE_TORCHRUN], env=environ, start_new_session=True
    )
    assert agent.wait(timeout=ENOUGH) == 0
    assert session_ends(agent.pid)
