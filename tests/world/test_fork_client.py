"""The client of the fork server: the processes that it gets, how they ended, and a server that
cannot give any."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_servers import Begin, is_gone, state_of
from processes import ENOUGH, is_alive

from playground.base.errors import ForkServerFailed
from playground.base.upstream import find_modules_as_here
from playground.tools.why.family import list_family
from playground.world.launcher import child_processes, fork_client, forked_process


def test_processes_that_are_killed_at_once_are_told_apart(begin: Begin) -> None:
    begin()
    processes = [forked_process.ForkedProcess(time.sleep, (60,)) for _ in range(3)]
    numbers = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV)
    for process, number in zip(processes, numbers, strict=True):
        os.kill(process.pid, number)
    assert [process.join(ENOUGH) for process in processes] == [-number for number in numbers]


def test_what_a_process_is_to_run_may_be_large(begin: Begin) -> None:
    begin()
    assert forked_process.ForkedProcess(len, (bytes(2**24),)).join(ENOUGH) == 0


def test_a_server_that_is_stopped_while_it_is_asked_is_named(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "STOPPED_LOOKS", 1)
    monkeypatch.setattr(fork_client, "LOOK_INTERVAL", 0.1)
    client = begin(busy="import os; os.kill(os.getpid(), 19)")
    with pytest.raises(
        ForkServerFailed, match=f"is stopped .SIGSTOP.: kill -CONT {client.pid} lets it go on"
    ):
        client.fork([])


def test_a_server_that_takes_long_is_not_taken_for_one_that_is_stopped(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "STOPPED_LOOKS", 1)
    monkeypatch.setattr(fork_client, "LOOK_INTERVAL", 0.01)
    begin(slow="import time; time.sleep(0.5)")
    assert forked_process.ForkedProcess(len, ("",)).join(ENOUGH) == 0


STARTS_STOPPED = {
    "the starter": "os.kill(os.getpid(), 19)",
    "the server": "os.register_at_fork(after_in_child=stop)",
    "both": "os.register_at_fork(after_in_child=stop, after_in_parent=stop)",
}


@pytest.mark.parametrize("source", STARTS_STOPPED.values(), ids=STARTS_STOPPED)
def test_a_server_that_is_stopped_before_it_has_begun_is_named_and_ends(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "STOPPED_LOOKS", 1)
    monkeypatch.setattr(fork_client, "LOOK_INTERVAL", 0.1)
    stop = "import os\ndef stop():\n    os.kill(os.getpid(), 19)\n"
    (tmp_path / "sitecustomize.py").write_text(stop + source)  # which Python runs first
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    client = fork_client.ForkServerClient(find_modules_as_here(), [], {})
    with pytest.raises(ForkServerFailed, match=r"is stopped .SIGSTOP.: kill -CONT \d+ ") as failure:
        client.fork([])
    pids = {client.starter, client.pid or client.starter, *list_family(client.starter)}
    assert any(f"-CONT {pid} lets it go on" in str(failure.value) for pid in pids)
    client.end()
    assert all(map(is_gone, pids))


def test_a_starter_that_is_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "LOOK_INTERVAL", 0.1)
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nos.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), 9))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    client = fork_client.ForkServerClient(find_modules_as_here(), [], {})
    with pytest.raises(ForkServerFailed, match="has ended without an answer"):
        client.fork([])
    client.end()


STOPS_ANOTHER = """
import os, signal, subprocess
sleep = subprocess.Popen(["sleep", "1000"])
sleep.send_signal(signal.SIGSTOP)
sleep.wait()
"""


def test_a_stopped_process_that_an_import_waits_for_is_named_and_ends_with_the_server(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "STOPPED_LOOKS", 1)
    monkeypatch.setattr(fork_client, "LOOK_INTERVAL", 0.1)
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


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with ours."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_server_that_cannot_even_answer_is_explained(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "END_LIMIT", 0.3)
    client = begin()
    assert forked_process.ForkedProcess(len, ("",)).join(ENOUGH) == 0
    resource.prlimit(client.pid, resource.RLIMIT_NOFILE, (3, 3))
    with pytest.raises(ForkServerFailed, match="has no file descriptor left"):
        client.fork([])


def test_a_signal_reaches_a_process_and_not_whoever_has_got_its_number(
    begin: Begin, stranger: subprocess.Popen[bytes]
) -> None:
    begin()
    process = forked_process.ForkedProcess(time.sleep, (60,))
    # as after the process has ended and as many others have been started
    process.pid = stranger.pid
    process.kill()
    process.join(ENOUGH)
    assert process.exitcode == -signal.SIGKILL
    process.terminate()
    process.kill()
    assert stranger.poll() is None


def test_a_descriptor_beyond_the_limit_is_inheritable_as_before(begin: Begin) -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 400, inheritable=True)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (400, most))
            pid = child_processes.spawn(
                ["/bin/sh", "-c", "exec 2>&-; [ ! -e /dev/fd/400 ]"], null.fileno(), null.fileno()
            )
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert os.get_inheritable(400)
            begin()
            assert forked_process.ForkedProcess(len, ("",)).join(ENOUGH) == 0
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
        child_processes.spawn(["true"], 0, 0)


def test_a_server_stopped_later_does_not_keep_anybody_waiting_for_an_exit_code(
    begin: Begin,
) -> None:
    client = begin()
    process = forked_process.ForkedProcess(time.sleep, (60,))
    os.kill(client.pid, signal.SIGSTOP)
    while state_of(client.pid) != "T":
        time.sleep(0.01)
    assert process.exitcode is None, "it still runs"
    process.kill()
    process.join()
    assert process.exitcode == forked_process.LOST_BY_THE_SERVER
    os.kill(client.pid, signal.SIGCONT)


def test_a_server_that_was_killed_is_named_and_replaced(begin: Begin) -> None:
    client = begin(busy="import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ForkServerFailed, match="has ended without an answer: out of memory"):
        client.fork([])
    assert not client.is_running()
    with contextlib.ExitStack() as ended:
        again = fork_client.running_server()
        ended.callback(again.end)
        again.meet()
        assert again.pid != client.pid
        assert again.is_running()


def test_nobody_waits_for_the_answer_of_a_server_killed_in_the_midst_of_it(begin: Begin) -> None:
    killed = "import os; os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), 9))"
    with pytest.raises(ForkServerFailed, match="has ended without an answer"):
        begin(fatal=killed).fork([])


def test_what_is_registered_with_atexit_runs_when_the_server_is_released(
    begin: Begin, tmp_path: Path
) -> None:
    client = begin(
        leaving="import atexit, pathlib; "
        f"atexit.register(pathlib.Path({str(tmp_path / 'left')!r}).write_text, 'yes')"
    )
    process = forked_process.ForkedProcess(len, ("",))
    process.join()
    fork_client.end_servers()
    assert is_gone(client.pid)
    assert (tmp_path / "left").read_text() == "yes"


def test_who_is_kept_by_a_launcher_is_found_though_the_server_is_no_child_of_it(
    begin: Begin,
) -> None:
    client = begin()
    process = forked_process.ForkedProcess(time.sleep, (60,))
    family = [*list_family(os.getpid())]
    assert {client.pid, process.pid} <= {*family}
    assert len(family) == len({*family})
    process.kill()
