"""The fork server and its client: processes, their ends, and a server that cannot give any. None
here imports torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from processes import ENOUGH, is_alive

from playground.runtime.errors import ForkServerFailed
from playground.runtime.launcher import server
from playground.runtime.launcher.server import ForkServerClient
from playground.runtime.upstream import find_modules_as_here

Begin = Callable[..., ForkServerClient]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """`begin(name=source, …)`: this process's fork server from now on, which imports modules of
    these sources."""
    clients = []

    def begin(**sources: str) -> ForkServerClient:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        client = ForkServerClient([str(tmp_path), *find_modules_as_here()], list(sources))
        monkeypatch.setattr(server, "_server", [client])
        clients.append(client)
        return client

    yield begin
    for client in clients:
        with contextlib.suppress(OSError, ValueError):  # a test has ended it
            client.end()


def is_gone(pid: int) -> bool:
    """Whether that child of ours ends, soon."""
    deadline = time.monotonic() + ENOUGH
    while time.monotonic() < deadline:
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return True
        except ChildProcessError:  # whoever ended it has waited for it
            return True
        time.sleep(0.01)
    return False


def state_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_processes_that_are_killed_at_once_are_told_apart(begin: Begin) -> None:
    begin()
    processes = [server.ForkedProcess(time.sleep, (60,)) for _ in range(3)]
    numbers = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV)
    for process, number in zip(processes, numbers, strict=True):
        os.kill(process.pid, number)
    assert [process.join(ENOUGH) for process in processes] == [-number for number in numbers]


def test_what_a_process_is_to_run_may_be_large(begin: Begin) -> None:
    begin()
    assert server.ForkedProcess(len, (bytes(2**24),)).join(ENOUGH) == 0


def test_a_child_of_the_launcher_does_not_keep_the_server_alive(begin: Begin) -> None:
    client = begin()
    process = server.ForkedProcess(time.sleep, (60,))
    if not (child := os.fork()):
        time.sleep(1000)
        os._exit(0)
    try:
        os.close(client.lifeline)  # as when the launcher is killed
        assert process.join(ENOUGH) == server.LOST_BY_THE_SERVER
        assert is_gone(client.pid)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_server_that_is_stopped_while_it_is_asked_is_named(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STOPPED_LOOKS", 1)
    monkeypatch.setattr(server, "LOOK_INTERVAL", 0.1)
    client = begin(busy="import os; os.kill(os.getpid(), 19)")
    with pytest.raises(
        ForkServerFailed, match=f"is stopped .SIGSTOP.: kill -CONT {client.pid} lets it go on"
    ):
        client.fork([])


STOPS_ANOTHER = """
import os, signal, subprocess
sleep = subprocess.Popen(["sleep", "1000"])
sleep.send_signal(signal.SIGSTOP)
sleep.wait()
"""


def test_a_stopped_process_that_an_import_waits_for_is_named_and_ends_with_the_server(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STOPPED_LOOKS", 1)
    monkeypatch.setattr(server, "LOOK_INTERVAL", 0.1)
    client = begin(waits=STOPS_ANOTHER)
    with pytest.raises(ForkServerFailed, match="waits for a process that is stopped") as failure:
        client.fork([])
    (pid,) = client.list_imported()
    assert f"kill -CONT {pid} lets it go on" in str(failure.value)
    assert state_of(pid) == "T"
    client.end()
    deadline = time.monotonic() + ENOUGH
    while is_alive(pid) and state_of(pid) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stopped_process_ends_with_a_server_that_is_killed(begin: Begin) -> None:
    client = begin()
    process = server.ForkedProcess(signal.raise_signal, (signal.SIGSTOP,))
    while state_of(process.pid) != "T":
        time.sleep(0.01)
    os.kill(client.pid, signal.SIGKILL)
    assert process.join(ENOUGH) == server.LOST_BY_THE_SERVER
    assert not is_alive(process.pid) or state_of(process.pid) == "Z"


def test_a_request_with_too_many_descriptors_is_refused_and_the_next_is_not(begin: Begin) -> None:
    client = begin(few="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))")
    for _ in range(3):
        with pytest.raises(ForkServerFailed, match="has no file descriptor left"):
            client.fork([0] * 20)
    for descriptor in client.fork([])[1:]:
        os.close(descriptor)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with ours."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_server_that_cannot_even_answer_is_explained(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "END_LIMIT", 0.3)
    client = begin()
    assert server.ForkedProcess(len, ("",)).join(ENOUGH) == 0
    resource.prlimit(client.pid, resource.RLIMIT_NOFILE, (3, 3))
    with pytest.raises(ForkServerFailed, match="has no file descriptor left"):
        client.fork([])


def test_a_signal_reaches_a_process_and_not_whoever_has_got_its_number(
    begin: Begin, stranger: subprocess.Popen[bytes]
) -> None:
    begin()
    process = server.ForkedProcess(time.sleep, (60,))
    # as after the process has ended and as many others have been started
    process.pid = stranger.pid
    process.kill()
    process.join(ENOUGH)
    assert process.exitcode == -signal.SIGKILL
    process.terminate()
    process.kill()
    assert stranger.poll() is None


def test_an_inheritable_descriptor_of_the_launcher_s_is_not_open_in_its_processes(
    begin: Begin,
) -> None:
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 250, inheritable=True)
    try:
        begin()
        # which fails, and so the process exits with 1
        process = server.ForkedProcess(os.fstat, (250,))
        process.join(ENOUGH)
        assert process.exitcode == 1
    finally:
        os.close(250)


def test_a_descriptor_beyond_the_limit_is_inheritable_as_before(begin: Begin) -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 400, inheritable=True)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (400, most))
            pid = server.spawn(
                ["/bin/sh", "-c", "exec 2>&-; [ ! -e /dev/fd/400 ]"], null.fileno(), null.fileno()
            )
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert os.get_inheritable(400)
            begin()
            assert server.ForkedProcess(len, ("",)).join(ENOUGH) == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
            os.close(400)


@pytest.mark.parametrize(
    ("number", "option"), [(errno.EMFILE, "-n"), (errno.EAGAIN, "-u"), (errno.ENOMEM, "-v")]
)
def test_the_limit_that_keeps_a_server_from_starting_is_named(
    number: int, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: object, **options: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_spawn", refuse)
    with pytest.raises(ForkServerFailed, match=re.escape(f"(ulimit {option})")):
        server.spawn(["true"], 0, 0)


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
    process = server.ForkedProcess(signal.raise_signal, (signal.SIGSTOP,))
    while state_of(process.pid) != "T":
        time.sleep(0.01)
    os.close(client.lifeline)
    process.join(ENOUGH)
    assert process.exitcode == server.LOST_BY_THE_SERVER


def test_a_server_stopped_later_does_not_keep_anybody_waiting_for_an_exit_code(
    begin: Begin,
) -> None:
    client = begin()
    process = server.ForkedProcess(time.sleep, (60,))
    os.kill(client.pid, signal.SIGSTOP)
    process.kill()
    process.join()
    assert process.exitcode == server.LOST_BY_THE_SERVER
    os.kill(client.pid, signal.SIGCONT)


def test_a_server_that_was_killed_is_named_and_replaced(begin: Begin) -> None:
    client = begin(busy="import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ForkServerFailed, match="was killed by SIGKILL: out of memory"):
        client.fork([])
    assert not client.is_running()
    with contextlib.ExitStack() as ended:
        again = server.running_server()
        ended.callback(again.end)
        assert again.pid != client.pid
        assert again.is_running()


def test_nobody_waits_for_the_answer_of_a_server_killed_in_the_midst_of_it(begin: Begin) -> None:
    killed = "import os; os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), 9))"
    with pytest.raises(ForkServerFailed, match="was killed by SIGKILL"):
        begin(fatal=killed).fork([])


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
    process = server.ForkedProcess(time.sleep, (0.2,))
    process.join(ENOUGH)
    assert process.exitcode == 0
    assert client.is_running()


def test_what_is_registered_with_atexit_runs_when_the_server_is_released(
    begin: Begin, tmp_path: Path
) -> None:
    client = begin(
        leaving="import atexit, pathlib; "
        f"atexit.register(pathlib.Path({str(tmp_path / 'left')!r}).write_text, 'yes')"
    )
    process = server.ForkedProcess(len, ("",))
    process.join()
    server.release()
    assert is_gone(client.pid)
    assert (tmp_path / "left").read_text() == "yes"


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
    process = server.ForkedProcess(len, ("",))
    assert process.join(ENOUGH) == 0
    assert client.is_running()


def write_a_number(path: Path) -> None:
    path.write_text(str(sys.modules["numpy.random"].random()))


def test_forks_have_generators_of_their_own(begin: Begin, tmp_path: Path) -> None:
    begin(drawing="import numpy.random")
    for name in ("one", "other"):
        assert server.ForkedProcess(write_a_number, (tmp_path / name,)).join(ENOUGH) == 0
    assert (tmp_path / "one").read_text() != (tmp_path / "other").read_text()
