"""The command line in odd surroundings: closed, full and unread streams, small limits, folders that
are not there. These tests themselves, where signals are ignored, and where something never
comes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from playground.base import process_checks as surroundings
from playground.world import UsageError, launch

SIGPIPE_CODE = 128 + signal.SIGPIPE
COMMAND = f"{sys.executable} -m playground"
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")


def shell(line: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a line of bash; the code of its first command that fails."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


ELSEWHERE = """
import importlib, os, runpy, signal, socket, sys

for name in ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None
for module, names in (
    (os, "fork forkpty killpg memfd_create pidfd_open sched_getaffinity setsid waitid O_NOFOLLOW"),
    (signal, "SIGCHLD SIGHUP SIGKILL SIGQUIT pidfd_send_signal pthread_sigmask"),
    (socket, "AF_UNIX recv_fds send_fds"),
):
    for name in names.split():
        delattr(module, name)
for words in ("", "--help", "hello", "exercise", "check swap.py", "play", "run -n 2 train.py"):
    sys.argv[1:] = words.split()
    try:
        runpy.run_module("playground", run_name="__main__")
    except SystemExit as error:
        print(words, error.code)
import playground
import playground.lessons

try:
    playground.launch
except importlib.import_module("playground.base.errors").UsageError as error:
    print("launch", error.exit_code)
try:
    playground.load_ipython_extension(None)
except importlib.import_module("IPython.core.error").UsageError as error:
    print(error)
"""


def test_where_no_rank_can_be_started_a_line_says_what_works() -> None:
    """Without the modules and calls that only Linux has: every command, before it imports anything
    that needs them. The lessons' table, which boards import with each other, needs none."""
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True)
    *codes, line = done.stdout.splitlines()
    words = ["", "--help", "hello", "exercise", "check swap.py", "play", "run -n 2 train.py"]
    assert codes == [f"{each} 2" for each in [*words, "launch"]], done.stderr
    assert done.stderr == f"playground: {line}\n" * len(words)
    assert "torchrun --nproc-per-node 2" in line
    assert all(name in line for name in ("wsl --install", "docker run", "Colab", "running.md"))


def test_an_older_kernel_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    assert surroundings.find_obstacle() == ""
    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert "Linux 5.3" in surroundings.find_obstacle()


@pytest.mark.parametrize("words", ["--help", "hello -n 2"])
def test_output_that_nobody_reads_is_no_error(words: str) -> None:
    unread = shell(f"{COMMAND} {words} | true")
    assert unread.returncode in (0, SIGPIPE_CODE)
    assert unread.stderr == ""


@FULL
def test_output_that_does_not_fit_is_one_line() -> None:
    full = shell(f"{COMMAND} hello -n 2 > /dev/full")
    assert full.returncode == 1
    assert full.stderr == "playground: cannot write to standard output (No space left on device)\n"


@FULL
def test_an_error_keeps_its_exit_code_where_nobody_can_be_told() -> None:
    for stderr in ("/dev/full", "&-"):
        assert shell(f"{COMMAND} nosuch 2> {stderr}").returncode == 2


@pytest.mark.stress
def test_neither_a_temporary_folder_nor_many_open_files_are_needed(tmp_path: Path) -> None:
    """Nor standard input and standard error."""
    environ = {**os.environ, "TMPDIR": str(tmp_path / "missing")}
    done = shell(f"ulimit -n 40; {COMMAND} hello -n 2 <&- 2>&-", env=environ)
    assert done.returncode == 0
    assert done.stdout.count("largest difference between the two lists 0\n") == 2


@pytest.mark.stress
def test_all_standard_streams_may_be_closed() -> None:
    closed = shell(f"{COMMAND} hello -n 2 <&- >&- 2>&-")
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="others do not hold to that limit")
def test_too_little_memory_for_torch_is_one_line() -> None:
    limited = shell(f"ulimit -v 600000; {COMMAND} hello -n 2")
    assert limited.returncode == 1
    assert limited.stderr.startswith("playground: the fork server, which ranks come from, ")
    assert limited.stderr.count("\n") == 1
    assert "ulimit -v" in limited.stderr


def test_without_a_loopback_interface_the_ranks_are_not_started() -> None:
    own = "unshare --map-root-user --net"
    if shell(f"{own} true").returncode:
        pytest.skip("this system lets nobody have a network of their own")
    alone = shell(f"{own} {COMMAND} hello -n 2")
    assert (alone.returncode, alone.stderr.count("\n")) == (2, 1)
    assert "cannot reach 127.0.0.1 (Network is unreachable)" in alone.stderr
    assert "ip link set lo up" in alone.stderr


def test_launch_in_a_folder_that_has_been_deleted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="working folder has been deleted"):
        launch(len, 1)


SCRIPT = """
from playground import launch
def mine(rank, size):
    return rank
if __name__ == "__main__":
    print(launch({fn}, 2))
"""


def test_a_script_on_standard_input_cannot_send_its_own_functions() -> None:
    script = SCRIPT.format(fn="mine")
    refused = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=120
    )
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert (
        "UsageError: mine was defined in a notebook, at a prompt or in a script on standard input"
        in last
    )


@pytest.mark.stress
def test_a_script_on_standard_input_can_send_what_it_imports(tmp_path: Path) -> None:
    """And the temporary folder may have a long name."""
    deep = tmp_path / ("x" * 120)  # a socket in there could have no name: 108 bytes are the most
    deep.mkdir()
    environ, script = {**os.environ, "TMPDIR": str(deep)}, SCRIPT.format(fn="max")
    done = subprocess.run(
        [sys.executable, "-"],
        input=script,
        capture_output=True,
        text=True,
        timeout=120,
        env=environ,
    )
    assert (done.stdout, done.stderr) == ("[2, 2]\n", "")
    assert os.listdir(deep) == []


@pytest.mark.stress
def test_a_file_called_playground_in_the_working_folder_is_none_of_ours(tmp_path: Path) -> None:
    work, scripts = tmp_path / "work", tmp_path / "scripts"
    work.mkdir()
    scripts.mkdir()
    for name in ("playground.py", "queue.py"):
        (work / name).write_text("raise SystemExit('not this one')")
    (scripts / "mine.py").write_text(SCRIPT.format(fn="mine"))
    done = subprocess.run(
        [sys.executable, scripts / "mine.py"], cwd=work, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("[0, 1]\n", "")


def pytest_session(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """A session of its own, with the configuration of these tests, that ignores SIGINT, SIGHUP and
    SIGQUIT."""
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, words)]
    return subprocess.run(
        ["sh", "-c", 'trap "" INT HUP QUIT; exec "$@"', "sh", *command],
        capture_output=True, text=True, timeout=120, cwd=tests.parent, env={**os.environ,
        **environ},
    )  # fmt: skip


@pytest.mark.stress
def test_signals_that_the_session_ignores_are_not_ignored_by_what_tests_start() -> None:
    done = pytest_session(
        "tests/world/test_faults.py::test_ctrl_c_at_any_moment[0.3]", PLAYGROUND_TEST_LIMIT="60"
    )
    assert (done.returncode, done.stdout.splitlines()[-1][:9]) == (0, "1 passed "), done.stdout


IN_A_SESSION = '''
import subprocess, sys, threading
import conftest

SIGNALS = """
from signal import *
print(*(getsignal(number) == SIG_IGN for number in (SIGINT, SIGHUP, SIGQUIT)))
"""

def test_signals():
    words = [sys.executable, "-c", SIGNALS]
    assert subprocess.check_output(words, text=True) == "False False False\\n"
    conftest.LIMIT = 0.2  # of the next test

def test_waiting():
    threading.Event().wait()
'''


@pytest.mark.stress
def test_what_is_ignored_is_not_inherited_and_a_test_that_waits_for_what_never_comes_fails(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_in_a_session.py").write_text(IN_A_SESSION)
    done = pytest_session("-p", "conftest", tmp_path, PYTHONPATH="tests:tests/support")
    assert "Failed: no end within 0.2 s" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 failed, 1 passed "), done.stdout
    assert done.returncode == 1


@pytest.mark.stress
def test_a_descriptor_beyond_the_limit_is_no_obstacle() -> None:
    """It was opened before the limit was lowered."""
    done = shell(f"exec 200</dev/null; ulimit -n 100; {COMMAND} hello -n 2")
    assert (done.returncode, done.stderr) == (0, "")
