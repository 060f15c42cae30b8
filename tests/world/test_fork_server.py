"""The fork server: what it does with requests, and that it and its processes end with their
launcher."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from fork_servers import Begin, is_gone, state_of
from processes import ENOUGH, is_alive

from playground.base.errors import ForkServerFailed
from playground.world.launcher import forked_process


def test_a_child_of_the_launcher_does_not_keep_the_server_alive(begin: Begin) -> None:
    client = begin()
    process = forked_process.ForkedProcess(time.sleep, (60,))
    if not (child := os.fork()):
        time.sleep(1000)
        os._exit(0)
    try:
        os.close(client.lifeline)  # as when the launcher is killed
        assert process.join(ENOUGH) == forked_process.LOST_BY_THE_SERVER
        assert is_gone(client.pid)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_stopped_process_ends_with_a_server_that_is_killed(begin: Begin) -> None:
    client = begin()
    process = forked_process.ForkedProcess(signal.raise_signal, (signal.SIGSTOP,))
    while state_of(process.pid) != "T":
        time.sleep(0.01)
    os.kill(client.pid, signal.SIGKILL)
    assert process.join(ENOUGH) == forked_process.LOST_BY_THE_SERVER
    assert not is_alive(process.pid) or state_of(process.pid) == "Z"


def test_a_request_with_too_many_descriptors_is_refused_and_the_next_is_not(begin: Begin) -> None:
    client = begin(few="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))")
    for _ in range(3):
        with pytest.raises(ForkServerFailed, match="has no file descriptor left"):
            client.fork([0] * 20)
    for descriptor in client.fork([])[1:]:
        os.close(descriptor)


def test_an_inheritable_descriptor_of_the_launcher_s_is_not_open_in_its_processes(
    begin: Begin,
) -> None:
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 250, inheritable=True)
    try:
        begin()
        # which fails, and so the process exits with 1
        process = forked_process.ForkedProcess(os.fstat, (250,))
        process.join(ENOUGH)
        assert process.exitcode == 1
    finally:
        os.close(250)


def test_a_process_that_is_given_nothing_to_run_ends_quietly(
    begin: Begin, capfd: pytest.CaptureFixture[str]
) -> None:
    _, pidfd, status, work = begin().fork([])
    os.close(work)
    with open(pidfd, "rb"), open(status, "rb") as code:
        assert struct.unpack("q", code.read()) == (1,)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "module", ["", "import time; time.sleep(60)", "import os; os.kill(os.getpid(), 19)"]
)
def test_the_server_dies_with_its_launcher_whatever_it_is_doing(begin: Begin, module: str) -> None:
    client = begin(busy=module)
    time.sleep(0.1)
    os.close(client.lifeline)
    assert is_gone(client.pid)


def test_a_stopped_process_dies_with_its_launcher(begin: Begin) -> None:
    client = begin()
    process = forked_process.ForkedProcess(signal.raise_signal, (signal.SIGSTOP,))
    while state_of(process.pid) != "T":
        time.sleep(0.01)
    os.close(client.lifeline)
    process.join(ENOUGH)
    assert process.exitcode == forked_process.LOST_BY_THE_SERVER


def test_a_server_without_torch_says_so(begin: Begin) -> None:
    client = begin(torch="raise ImportError('failed to map\\nsegment')")
    expected = (
        r"cannot import torch \(ImportError: failed to map segment\): is torch installed, "
        r"is there memory"
    )
    for _ in range(2):
        with pytest.raises(ForkServerFailed, match=expected):
            client.fork([])


def test_the_end_of_a_child_that_is_no_rank_does_not_disturb_the_server(begin: Begin) -> None:
    client = begin(parent="import subprocess; subprocess.Popen(['sleep', '0.05'])")
    process = forked_process.ForkedProcess(time.sleep, (0.2,))
    process.join(ENOUGH)
    assert process.exitcode == 0
    assert client.is_running()


def test_a_launcher_that_gives_up_before_it_has_read_an_answer_does_not_disturb_the_server(
    begin: Begin,
) -> None:
    """As one that gets Ctrl-C several times."""
    client = begin()
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    with theirs, open(write, "wb"), open(read, "rb"):
        socket.send_fds(client.requests, [b"\0"], [theirs.fileno(), read])
    with ours:
        wait([ours], ENOUGH)
    process = forked_process.ForkedProcess(len, ("",))
    assert process.join(ENOUGH) == 0
    assert client.is_running()


def write_a_number(path: Path) -> None:
    path.write_text(str(sys.modules["numpy.random"].random()))


def test_forks_have_generators_of_their_own(begin: Begin, tmp_path: Path) -> None:
    begin(drawing="import numpy.random")
    for name in ("one", "other"):
        assert forked_process.ForkedProcess(write_a_number, (tmp_path / name,)).join(ENOUGH) == 0
    assert (tmp_path / "one").read_text() != (tmp_path / "other").read_text()
