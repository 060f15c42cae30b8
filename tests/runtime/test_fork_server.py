"""The fork server and its client: processes, their ends, and a server that cannot give any. None here imports torch."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import ENOUGH

from playground.runtime import fork_client, server
from playground.runtime.errors import ForkServerFailed
from playground.runtime.fork_client import ForkServerClient

Begin = Callable[..., ForkServerClient]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """`begin(name=source, …)`: this process's fork server from now on, which imports modules of these sources."""
    clients = []

    def begin(**sources: str) -> ForkServerClient:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        client = ForkServerClient([str(tmp_path), *server.find_modules_as_here()], list(sources))
        monkeypatch.setattr(server, "_server", [client])
        clients.append(client)
        return client

    yield begin
    for client in clients:
        with contextlib.suppress(OSError):  # a test has ended it
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


def test_a_process_of_the_server_ends_with_its_own_code(begin: Begin) -> None:
    begin()
    process = server.ForkedProcess(target=os._exit, args=(7,))
    process.start()
    process.join(ENOUGH)
    assert process.exitcode == 7


def test_processes_that_are_killed_at_once_are_told_apart(begin: Begin) -> None:
    begin()
    processes = [server.ForkedProcess(target=time.sleep, args=(60,)) for _ in range(3)]
    numbers = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV)
    for process in processes:
        process.start()
    for process, number in zip(processes, numbers, strict=True):
        assert process.pid
        os.kill(process.pid, number)
    for process in processes:
        process.join(ENOUGH)
    assert [process.exitcode for process in processes] == [-number for number in numbers]


def test_a_process_that_is_given_nothing_to_run_ends_quietly(begin: Begin, capfd: pytest.CaptureFixture[str]) -> None:
    _, status, work = begin().fork([])
    os.close(work)
    with open(status, "rb") as code:
        assert struct.unpack("q", code.read()) == (1,)
    assert capfd.readouterr().err == ""


def test_what_a_process_is_to_run_may_be_large(begin: Begin) -> None:
    begin()
    process = server.ForkedProcess(target=len, args=(bytes(2**24),))
    process.start()
    process.join(ENOUGH)
    assert process.exitcode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for a signal")
@pytest.mark.parametrize("module", ["", "import time; time.sleep(60)", "import os; os.kill(os.getpid(), 19)"])
def test_the_server_dies_with_its_launcher_whatever_it_is_doing(begin: Begin, module: str) -> None:
    client = begin(busy=module)
    time.sleep(0.1)
    os.close(client.lifeline)
    assert is_gone(client.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for a signal")
def test_a_stopped_process_dies_with_its_launcher(begin: Begin) -> None:
    client = begin()
    process = server.ForkedProcess(target=signal.raise_signal, args=(signal.SIGSTOP,))
    process.start()
    while state_of(process.pid) != "T":
        time.sleep(0.01)
    os.close(client.lifeline)
    process.join(ENOUGH)
    assert process.exitcode == server.LOST_BY_THE_SERVER


def test_a_stopped_server_is_named(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "STOPPED_LIMIT", 1)
    client = begin()
    os.kill(client.pid, signal.SIGSTOP)
    process = server.ForkedProcess(target=time.sleep, args=(60,))
    with pytest.raises(ForkServerFailed, match=f"is stopped .SIGSTOP.: kill -CONT {client.pid} lets it go on"):
        process.start()


def test_a_server_stopped_later_does_not_keep_anybody_waiting_for_an_exit_code(begin: Begin) -> None:
    client = begin()
    process = server.ForkedProcess(target=time.sleep, args=(60,))
    process.start()
    os.kill(client.pid, signal.SIGSTOP)
    process.kill()
    process.join()
    assert process.exitcode == server.LOST_BY_THE_SERVER


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


def test_a_server_that_let_go_of_a_rank_without_a_word_is_not_asked_again(begin: Begin) -> None:
    """Though nothing else says yet that it is dead: the kernel is still closing its files, one after the other."""
    client = begin()
    status, theirs = os.pipe()
    os.close(theirs)
    with open(status, "rb"):
        assert client.read_exit_code(status, unknown=255) == 255
    assert not client.is_running()


def test_nobody_waits_for_the_answer_of_a_server_killed_in_the_midst_of_it(begin: Begin) -> None:
    killed = "import os; os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), 9))"
    with pytest.raises(ForkServerFailed, match="was killed by SIGKILL"):
        begin(fatal=killed).fork([])


def test_a_server_without_torch_says_so(begin: Begin) -> None:
    client = begin(torch="raise ImportError('failed to map\\nsegment')")
    expected = r"cannot import torch \(ImportError: failed to map segment\): is torch installed, is there memory"
    for _ in range(2):
        with pytest.raises(ForkServerFailed, match=expected):
            client.fork([])


def test_too_few_descriptors_for_a_request(begin: Begin) -> None:
    client = begin(few="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))")
    with pytest.raises(ForkServerFailed, match="has no file descriptor left"):
        client.fork([0] * 20)


def test_what_is_registered_with_atexit_runs_when_the_server_is_released(begin: Begin, tmp_path: Path) -> None:
    client = begin(
        leaving=f"import atexit, pathlib; atexit.register(pathlib.Path({str(tmp_path / 'left')!r}).write_text, 'yes')"
    )
    process = server.ForkedProcess(target=len, args=("",))
    process.start()
    process.join()
    server.release()
    assert is_gone(client.pid)
    assert (tmp_path / "left").read_text() == "yes"
