"""A rank's process is its program's: nothing of ours is seen there, in the way, or inherited by
what it starts, and it is what a process that the caller starts would be."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import Fork, Run
from processes import ENOUGH
from programs import Outcome

from playground import RankFailed, launch
from playground.base.process_attributes import read_inheritance
from playground.world.launcher.launch import LaunchConfig
from playground.world.rank.reports import HUNG_UP, Event


def take_a_signal(rank: int, size: int) -> str:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.kill(os.getpid(), signal.SIGUSR1)
    return signal.Signals(signal.sigwait({signal.SIGUSR1})).name


def test_a_signal_that_the_program_waits_for_reaches_it() -> None:
    assert launch(take_a_signal, 2) == ["SIGUSR1"] * 2


def list_threads(rank: int, size: int) -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_the_program_sees_its_own_threads_alone() -> None:
    assert launch(list_threads, 2) == [["MainThread"]] * 2


LIST = "import os; print(*sorted(os.listdir('/proc/self/fd'), key=int))"


def list_inherited(rank: int, size: int) -> str:
    """The descriptors of a child that inherits all it can; the last is the folder's."""
    words = [sys.executable, "-c", LIST]
    return subprocess.run(words, close_fds=False, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("bare", [False, True])
def test_a_child_inherits_the_standard_streams_alone(bare: bool) -> None:
    """While its process group stands, too, if that is ours: it inherits none of torch's sockets."""
    assert launch(list_inherited, 2, bare=bare) == ["0 1 2 3\n"] * 2


def close_all(rank: int, size: int, result: str | None) -> str | None:
    os.closerange(3, 4096)
    return result


def test_a_program_may_close_all_descriptors() -> None:
    assert launch(close_all, 2, args=(None,), bare=True) == [None, None]


def close_all_and_go_on(rank: int, size: int, heard: Path) -> None:
    opened = [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2]
    lines = [number for number in opened if Path(f"/proc/self/fd/{number}").is_socket()]
    ends = [socket.socket(fileno=os.dup(number)) for number in lines]
    os.closerange(max(end.fileno() for end in ends) + 1, 4096)
    for end in ends:  # a thread that reads from one does not keep it
        end.shutdown(socket.SHUT_RDWR)
    while not heard.exists():
        time.sleep(0.01)


def test_a_program_that_has_closed_all_descriptors_goes_on(tmp_path: Path) -> None:
    """As long as it likes, after its launcher has seen that."""
    heard, heard_of = tmp_path / "heard", set[int]()

    def listen(rank: int, event: Event) -> None:
        if HUNG_UP in event:
            heard_of.add(rank)
        if len(heard_of) == 2:
            heard.touch()

    config = LaunchConfig(bare=True, on_report=listen)
    assert launch(close_all_and_go_on, 2, args=(heard,), config=config) == [None, None]


def test_a_group_of_ranks_that_have_closed_all_descriptors_is_one(
    run_cli: Run, tmp_path: Path
) -> None:
    """What is not heard of them is not said of them."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nimport torch.distributed as dist\nos.closerange(3, 4096)\n"
        "dist.init_process_group('gloo')\nprint(dist.get_world_size())\n"
    )
    assert run_cli("run", "-n", 2, script) == Outcome(0, "2\n2\n", "")


def test_what_a_rank_returns_that_has_closed_the_way_back_is_lost_and_that_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RankFailed, match="exited with code 1 without a result"):
        launch(close_all, 1, args=("lost",), bare=True)
    assert "what this rank returned is lost" in capfd.readouterr().err


def test_a_rank_that_has_closed_all_descriptors_ends_with_its_launcher(
    fork_program: Fork, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nos.closerange(3, 4096)\n"
        f"open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w').write(str(os.getpid()))\n"
        "time.sleep(1000)\n"
    )
    program = fork_program("playground", "run", "-n", 2, tmp_path / "train.py")
    deadline = time.monotonic() + ENOUGH
    while len(found := [*tmp_path.glob("[01]")]) < 2 or not all(each.read_text() for each in found):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    program.send_signal(signal.SIGKILL)
    for each in found:
        while Path("/proc", each.read_text(), "exe").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def read_clock(rank: int, size: int) -> tuple[str, int]:
    return time.tzname[0], time.localtime(0).tm_hour


def test_the_clock_is_the_caller_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "JST-9")
    assert launch(read_clock, 2) == [("JST", 9)] * 2


def draw(rank: int, size: int) -> list[float]:
    return [torch.rand(1).item(), random.random(), np.random.rand()]


def test_each_rank_of_each_launch_draws_numbers_of_its_own() -> None:
    drawn = [numbers for _ in range(2) for numbers in launch(draw, 3, fresh=True)]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 6


def inherited(rank: int, size: int) -> list[object]:
    found = read_inheritance()
    return [(found.users, found.groups), found.umask, found.limits, found.niceness]


def test_a_rank_has_what_a_process_that_the_caller_starts_now_would_have(run_script: Run) -> None:
    """Its rights, too, where the caller may give them away."""
    done = run_script(
        """
        import os, resource
        from playground import launch
        from test_own_process import inherited

        if __name__ == "__main__":
            before = launch(inherited, 1)
            os.umask(0o027)
            os.nice(1)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if os.geteuid() == 0:
                os.setgid(65534)  # another user might not even read this interpreter
            there = launch(inherited, 1)
            assert there == [inherited(0, 1)], there
            changed = [now != then for now, then in zip(there[0], before[0])]
            assert changed == [os.getegid() == 65534, True, True, True], changed
        """,
        PYTHONPATH=str(Path(__file__).parent),
    )
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("spawn", [False, True])
def test_a_caller_can_wait_for_all_its_children(spawn: bool, run_script: Run) -> None:
    done = run_script(
        f"""
        import os
        from playground import launch
        from playground.lessons.p2p.lesson import blocking

        if __name__ == "__main__":
            launch(blocking, 2, spawn={spawn})
            try:
                print(os.wait())
            except ChildProcessError:
                print("none is left")
        """
    )
    assert (done.code, done.out, done.err) == (0, "none is left\n", "")


class OnlyThere:
    """Can be made in a rank, and nowhere else."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return refuse_elsewhere, (os.getpid(),)


def refuse_elsewhere(pid: int) -> None:
    raise ValueError("made for a rank")


def return_what_cannot_be_read(rank: int, size: int) -> OnlyThere | None:
    return OnlyThere() if rank == 1 else None


def test_a_result_that_cannot_be_read_names_its_rank_and_what_to_do() -> None:
    expected = (
        r"rank 1 of 2 returned what cannot be read here .ValueError: made for\sa rank.: return"
    )
    with pytest.raises(RankFailed, match=expected):
        launch(return_what_cannot_be_read, 2)


def test_a_package_of_the_program_s_that_has_our_name_is_named(
    fork_program: Fork, tmp_path: Path
) -> None:
    (tmp_path / "playground").mkdir()
    for name in ("__init__", "models"):
        (tmp_path / "playground" / f"{name}.py").write_text("")
    (tmp_path / "train.py").write_text("import playground.models\n")
    program = fork_program("playground", "run", "-n", 1, tmp_path / "train.py")
    err = program.communicate(timeout=ENOUGH)[1]
    theirs = tmp_path / "playground"
    assert f"the program's own {theirs} has the name of the package that runs it" in err
    assert len(err.splitlines()) == 1
    assert program.returncode == 2


class Code:
    """A pickle of it runs a function where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., int], tuple[Path, str]]:
        return Path.write_text, (self.path, "was run")


def let_a_fork_speak(rank: int, size: int, path: Path) -> None:
    """As a program could that a rank starts, if it had the rank's line."""
    from playground.world.rank import rank as own

    assert own._launcher
    line = os.dup(own._launcher.line.fileno())
    if not os.fork():
        Connection(line).send(("result", pickle.dumps(Code(path)), []))
        os._exit(0)
    os.wait()
    time.sleep(1000)


def test_what_another_process_says_for_a_rank_is_not_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "written"
    with pytest.raises(RankFailed, match=r"process \d+, which is not the\srank, speaks for it"):
        launch(let_a_fork_speak, 1, args=(path,))
    assert not path.exists()


def return_code_as_nobody(rank: int, size: int, path: Path, result: object) -> object:
    if os.getuid() == 0:
        os.setuid(65534)
    return Code(path) if result is None else result


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_of_a_rank_that_has_become_another_user_plain_data_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "written"
    assert launch(return_code_as_nobody, 1, args=(path, [1, "two"])) == [[1, "two"]]
    with pytest.raises(RankFailed, match=r"returned what cannot be read here .UnpicklingError"):
        launch(return_code_as_nobody, 1, args=(path, None))
    assert not path.exists()
