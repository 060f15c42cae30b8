"""A rank is a process as those that torchrun starts: how it ends, what its end does, and what it
may start itself."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import ENOUGH, is_alive, session_ends
from programs import SCRIPT, ForkedProgram, Outcome
from torch.utils.data import DataLoader, Dataset

import playground
from playground import RankFailed, preempted, report
from playground.base import upstream
from playground.world.rank.process import is_written

launch = partial(playground.launch, fresh=True)
"""Every test here is about the life of new processes."""


def end_in_each_way(rank: int, size: int) -> int:
    dist.barrier()
    if rank == 1:
        sys.exit()
    if rank == 2:
        sys.exit(0)
    if rank == 3:
        os._exit(0)
    return rank


def test_an_exit_with_code_0_is_a_return_of_none() -> None:
    assert launch(end_in_each_way, 4) == [0, None, None, None]


def exit_with(rank: int, size: int, code: object) -> None:
    dist.barrier()
    if rank == 1:
        sys.exit(code)  # type: ignore[arg-type]
    time.sleep(1000)


@pytest.mark.parametrize("code", [3, "no such file"])
def test_another_exit_is_a_failure(code: object) -> None:
    with pytest.raises(RankFailed, match=f"^rank 1 of 2 failed: SystemExit: {code}\n"):
        launch(exit_with, 2, args=(code,))


class Thing:
    """May be referred to weakly."""


left: list[object] = []


def leave_everything(rank: int, size: int, folder: Path, fails: bool) -> None:
    """Neither close, flush nor join anything."""
    atexit.register(dist.destroy_process_group)  # the group stands
    atexit.register(print, "at exit", rank)
    thing = Thing()
    weakref.finalize(thing, print, "finalizer", rank)
    opened = open(folder / f"{rank}", "w")  # noqa: SIM115 (it stays open)
    opened.write("written")
    left.extend([thing, opened])
    ctypes.CDLL(None).printf(b"C %d\n", rank)
    assert sys.__stdout__
    sys.__stdout__.write(f"dunder {rank}\n")
    if fails:
        raise ValueError("this rank has had enough")


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_process_does_at_its_end_is_done(
    fails: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    size = 1 if fails else 2
    try:
        assert launch(leave_everything, size, args=(tmp_path, fails)) == [None] * size
    except RankFailed:
        assert fails
    out, err = capfd.readouterr()
    for rank in range(size):
        assert (tmp_path / f"{rank}").read_text() == "written"
        assert {f"at exit {rank}", f"finalizer {rank}", f"C {rank}", f"dunder {rank}"} <= {
            *out.splitlines()
        }
    assert err == ""


def open_a_file(rank: int, size: int, path: Path) -> int:
    left.append(opened := open(path, "w"))  # noqa: SIM115 (it stays open)
    opened.write("written")
    return os.getpid()


def test_files_are_flushed_when_a_world_is_kept(tmp_path: Path) -> None:
    playground.launch(open_a_file, 1, args=(tmp_path / "file",))
    assert (tmp_path / "file").read_text() == "written"


def test_files_that_are_open_for_writing_are_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("there")
    for mode, expected in (("r", False), ("r+", True), ("a", True), ("w+", True)):
        with open(tmp_path / "file", mode) as file:
            assert is_written(str(file.fileno())) is expected, mode
    ours, theirs = os.pipe()
    assert not is_written(str(theirs)), "it has no name"
    os.close(ours)
    os.close(theirs)


def end_in_children(rank: int, size: int) -> list[int]:
    ways: list[Callable[[], object]] = [
        lambda: None,
        sys.exit,
        lambda: sys.exit(4),
        lambda: sys.exit("so"),
        lambda: 1 / 0,
    ]
    codes = []
    for way in ways:
        if not (child := os.fork()):
            way()
            return []
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes


def test_a_child_that_comes_back_ends_as_a_script_does(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(end_in_children, 1) == [[0, 0, 4, 1, 1]]
    err = capfd.readouterr().err
    assert "so\n" in err
    assert "ZeroDivisionError" in err


def send_itself_signals(rank: int, size: int) -> tuple[list[int], list[int], int]:
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
    codes = []
    for number in numbers:
        with subprocess.Popen(["sleep", "1000"]) as child:
            child.send_signal(number)
        codes.append(child.returncode)
        signal.signal(number, lambda number, frame: heard.append(number))
        os.kill(os.getpid(), number)
    return heard, codes, os.getpgrp() - os.getpid()


def test_a_rank_and_its_children_hear_signals_and_those_of_a_terminal_do_not_reach_them() -> None:
    heard, codes, difference = launch(send_itself_signals, 1)[0]
    assert heard == [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM]
    assert codes == [-number for number in heard]
    assert difference == 0, "a group of its own"


def terminate_a_child(rank: int, size: int) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    child.terminate()
    child.join()
    assert not preempted()
    return child.exitcode


def test_sigterm_ends_a_child_of_a_rank_that_leaves_it_to_the_launcher() -> None:
    assert launch(terminate_a_child, 1, grace=1.0) == [-signal.SIGTERM]


class Unpicklable(Dataset[int]):
    def __init__(self) -> None:
        self.double: Callable[[int], int] = lambda index: 2 * index

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.double(index)


def use_workers(rank: int, size: int) -> tuple[list[int], str, object]:
    assert multiprocessing.get_start_method(allow_none=True) is None
    if sys.version_info < (3, 14):
        batches = list(DataLoader(Unpicklable(), num_workers=2))
    else:
        batches = [torch.tensor([2 * index]) for index in range(4)]
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,)).start()
    return (
        [int(batch) for batch in batches],
        multiprocessing.current_process().name,
        multiprocessing.parent_process(),
    )


def choose_a_method(rank: int, size: int) -> str:
    multiprocessing.set_start_method("spawn")
    return multiprocessing.get_start_method()


def test_how_a_rank_starts_processes_is_the_platform_s_and_its_program_s_choice() -> None:
    assert launch(use_workers, 2) == [([0, 2, 4, 6], "MainProcess", None)] * 2
    assert launch(choose_a_method, 2) == ["spawn"] * 2


def test_to_launch_chooses_no_method_for_the_launcher() -> None:
    chosen = multiprocessing.get_start_method(allow_none=True)
    try:
        for method in (None, "spawn"):
            multiprocessing.set_start_method(method, force=True)
            assert "start_method" not in upstream.describe_program()
            assert multiprocessing.get_start_method(allow_none=True) == method
    finally:
        multiprocessing.set_start_method(chosen, force=True)


def start_children(rank: int, size: int, how: str) -> list[int]:
    """A child that ignores SIGTERM, and one with a program of its own."""
    if rank == 0:
        if not (child := os.fork()):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        pids = [child, subprocess.Popen(["sleep", "1000"]).pid]
        report(pids=pids)
        if how == "stays":
            print(*pids, flush=True)
    if how == "returns":
        return pids
    dist.barrier()
    if rank == 1 and how == "raises":
        raise ValueError("this rank has had enough")
    if rank == 0 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
    return []


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_what_ranks_have_started_ends_with_a_world_that_fails(how: str) -> None:
    pids: list[int] = []
    with pytest.raises(RankFailed):
        launch(
            start_children, 2, args=(how,), on_report=lambda rank, event: pids.extend(event["pids"])
        )
    deadline = time.monotonic() + ENOUGH
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(pids) == 2


def start_a_child_that_tidies_up(rank: int, size: int, folder: Path) -> None:
    if not os.fork():
        signal.signal(signal.SIGTERM, lambda number, frame: (folder / "tidied").touch())
        (folder / "ready").touch()
        time.sleep(1000)
        os._exit(0)
    while not (folder / "ready").exists():
        time.sleep(0.01)
    raise ValueError("this rank has had enough")


def test_what_a_rank_has_started_is_asked_to_end_before_it_is_killed(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="had enough"):
        launch(start_a_child_that_tidies_up, 1, args=(tmp_path,))
    deadline = time.monotonic() + ENOUGH
    while not (tmp_path / "tidied").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_rank_has_started_may_stay_when_it_has_returned() -> None:
    pids = launch(start_children, 1, args=("returns",))[0]
    assert all(map(is_alive, pids))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


LEAVES_A_CHILD = """
import os, sys, time
folder = sys.argv[1]
if os.environ["RANK"] == "0" and not os.fork():
    while not os.path.exists(f"{folder}/over"):
        time.sleep(0.01)
    open(f"{folder}/late", "w").close()
    os._exit(0)
"""


def test_what_a_program_has_forked_may_outlive_the_launcher(
    fork_program: Callable[..., ForkedProgram], tmp_path: Path
) -> None:
    """As under torchrun."""
    (tmp_path / "train.py").write_text(LEAVES_A_CHILD)
    program = fork_program("playground", "run", "-n", "2", str(tmp_path / "train.py"), tmp_path)
    assert program.wait(ENOUGH) == 0
    (tmp_path / "over").touch()
    deadline = time.monotonic() + ENOUGH
    while not (tmp_path / "late").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


STAYING = """
from playground import launch
from test_process import start_children

if __name__ == "__main__":
    launch(start_children, 2, args=("stays",))
"""


def test_what_ranks_have_started_ends_when_the_launcher_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_program: Callable[..., ForkedProgram]
) -> None:
    (tmp_path / f"{SCRIPT}.py").write_text(STAYING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    program = fork_program(SCRIPT)
    assert len(program.stdout.readline().split()) == 2
    program.send_signal(signal.SIGKILL)
    assert session_ends(program.pid)


def test_a_rank_that_is_stopped_before_it_is_up_is_not_waited_for(
    run_script: Callable[[str], Outcome],
) -> None:
    done = run_script(
        """
        import os, signal
        from multiprocessing import current_process
        from playground import RankTimeout, launch

        if getattr(current_process(), "_inheriting", False):  # a rank imports this
            os.kill(os.getpid(), signal.SIGSTOP)

        def rank(rank, size):
            return rank

        if __name__ == "__main__":
            try:
                launch(rank, 2, timeout=0.3)
            except RankTimeout as error:
                print(error.headline)
        """
    )
    assert done.out.startswith("no sign of life for 0.3 s from ranks 0-1 of 2"), done
    assert done.err == ""
