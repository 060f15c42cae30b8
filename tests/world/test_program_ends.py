"""A rank of a program is its program: it ends when that does, as the interpreter ends it, and what
torch reads from the environment at a call, the program may set. Each program does under torchrun
what it does here."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures import Fork
from fork_servers import state_of
from processes import ENOUGH, by_hand, free_port, session_ends
from programs import ForkedProgram, Outcome

HEAD = """
import atexit, datetime, fcntl, os, signal, socket, sys, threading, time
import torch
import torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def add():
    dist.all_reduce(total := torch.ones(1))
    print(total.item())
"""
HOW = ("run", "joined")
"""Whether the ranks are ours, or were started by somebody else, with a store that rank 0 serves."""
Runs = Callable[..., list[Outcome]]


@pytest.fixture
def run_program(fork_program: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """`run_program(text, size, how)`: how `playground run` ends with a program of this text; as a
    rank of a joined world, how each of them ends."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, size: int = 2, how: str = "run", *words: Any, **environ: str) -> Any:
        (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(text))
        words = ("playground", "run", *(("-n", size) if how == "run" else ()), *words, "train.py")
        port = free_port()
        places = [by_hand(rank, size, port) for rank in range(size)] if how == "joined" else [{}]
        return [
            finish(one) for one in [fork_program(*words, **place, **environ) for place in places]
        ]

    return run


def finish(program: ForkedProgram) -> Outcome:
    out, err = program.communicate(timeout=ENOUGH)
    assert session_ends(program.pid)
    return Outcome(program.returncode, out, err)


def says(ended: Sequence[Outcome], *lines: str) -> None:
    """All have ended well, and these lines are what they have printed."""
    assert [(each.code, each.err) for each in ended] == [(0, "")] * len(ended)
    assert sorted("".join(each.out for each in ended).splitlines()) == sorted(lines)


# --- what the environment says ---


@pytest.mark.parametrize("how", HOW)
def test_ranks_that_a_program_sets_are_its_ranks(run_program: Runs, how: str) -> None:
    text = """
        os.environ["RANK"] = str(size - 1 - rank)
        dist.init_process_group("gloo")
        add()
        print(rank, "is", dist.get_rank())
    """
    says(run_program(text, 3, how), *["3.0"] * 3, "0 is 2", "1 is 1", "2 is 0")


def test_a_spare_rank_may_end_while_the_others_form_a_smaller_world(run_program: Runs) -> None:
    """And is not taken for one that they wait for."""
    text = """
        if rank < 2:
            os.environ["WORLD_SIZE"] = "2"
            dist.init_process_group("gloo")
            time.sleep(1)  # several looks of the launcher
            add()
    """
    says(run_program(text, 3), "2.0", "2.0")


@pytest.mark.parametrize("name", ["'localhost'", "socket.gethostname()"])
def test_the_store_may_be_called_by_another_name_of_this_host(run_program: Runs, name: str) -> None:
    text = f"""
        os.environ["MASTER_ADDR"] = {name}
        for _ in range(2):
            dist.init_process_group("gloo")
            add()
            dist.destroy_process_group()
    """
    says(run_program(text), *["2.0"] * 4)


def test_a_port_of_the_program_s_own_is_served_by_its_rank_0(run_program: Runs) -> None:
    text = f"""
        os.environ["MASTER_PORT"] = "{free_port()}"
        dist.init_process_group("gloo")
        add()
        print(os.environ["TORCHELASTIC_USE_AGENT_STORE"])
    """
    says(run_program(text), "2.0", "2.0", "True", "True")


def test_the_store_is_there_when_rank_0_has_ended(run_program: Runs) -> None:
    text = """
        if rank == 0:
            os._exit(0)
        time.sleep(0.5)
        os.environ |= {"RANK": str(rank - 1), "WORLD_SIZE": "2"}
        dist.init_process_group("gloo")
        add()
    """
    says(run_program(text, 3), "2.0", "2.0")


@pytest.mark.parametrize("how", HOW)
def test_the_timeout_of_the_world_is_its_store_s(run_program: Runs, how: str) -> None:
    text = """
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
        try:
            dist.distributed_c10d._get_default_store().get("nothing")
        except dist.DistStoreError:
            print("not there")
    """
    ended = run_program(text, 2, how)
    assert [each.code for each in ended] == [0] * len(ended)
    assert "".join(each.out for each in ended) == "not there\n" * 2  # torch warns of it on stderr


@pytest.mark.parametrize("safe", ["1", ""])
def test_a_safe_path_is_without_the_script_s_folder(
    run_program: Runs, tmp_path: Path, safe: str
) -> None:
    (tmp_path / "beside.py").touch()
    text = """
        try:
            import beside
        except ImportError:
            print("not found")
    """
    says(run_program(text, 1, PYTHONSAFEPATH=safe), *["not found"] * bool(safe))


# --- when it ends, and as what ---

FILES = """
import bz2, gzip, lzma, shelve, tempfile, zipfile

del add  # a cycle with its globals, in which the files below would be deleted in any order
opened = (gzip.open, bz2.open, lzma.open)
kept = [open_it(f"{rank}.{open_it.__module__}", "wb") for open_it in opened]
for file in kept:
    file.write(b"whole" * 1000)
archive = zipfile.ZipFile(f"{rank}.zip", "w")
archive.writestr("name", "whole")
shelf = shelve.open(f"{rank}.shelf", writeback=True)
shelf["list"] = []
shelf["list"].append("whole")
temporary = tempfile.NamedTemporaryFile(dir=".", prefix="temporary")
"""


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "raise ValueError('no')"])
@pytest.mark.parametrize("how", HOW)
def test_what_is_open_is_closed_as_the_interpreter_closes_it(
    run_program: Runs, tmp_path: Path, how: str, end: str
) -> None:
    import bz2
    import gzip
    import lzma
    import shelve
    import zipfile

    ended = run_program(f"{FILES}\n{end}", 1, how)
    assert [(each.code, each.out) for each in ended] == [(int("raise" in end), "")]
    for module in (gzip, bz2, lzma):
        with module.open(f"0.{module.__name__}") as file:
            assert file.read() == b"whole" * 1000
    assert zipfile.ZipFile("0.zip").read("name") == b"whole"
    with shelve.open("0.shelf") as shelf:
        assert shelf["list"] == ["whole"]
    assert not [*tmp_path.glob("temporary*")]


@pytest.mark.parametrize("how", HOW)
def test_what_libraries_leave_is_no_leak(run_program: Runs, how: str) -> None:
    """What Triton's bindings would complain of stays, with all that was imported before."""
    says(run_program("import torch._dynamo\nprint('done')", 1, how), "done")


@pytest.mark.parametrize("end", ["", "raise ValueError('no')"])
def test_what_is_left_is_deleted(run_program: Runs, end: str) -> None:
    text = f"""
        class Closing:
            def __del__(self):
                print("deleted")

        closing = Closing()
        {end}
    """
    [ended] = run_program(text, 1)
    assert (ended.code, ended.out) == (int(bool(end)), "deleted\n")


@pytest.mark.parametrize("how", HOW)
def test_a_collective_at_exit_meets_one_in_another_s_program(run_program: Runs, how: str) -> None:
    text = """
        dist.init_process_group("gloo")
        if rank == 1:
            atexit.register(add)
        else:
            time.sleep(1)  # several looks of the launcher
            add()
    """
    says(run_program(text, 2, how), "2.0", "2.0")


@pytest.mark.parametrize("how", HOW)
def test_a_peer_that_has_ended_is_the_end_of_a_stream(run_program: Runs, how: str) -> None:
    text = """
        dist.init_process_group("gloo")
        received = -1
        try:
            while True:
                received += 1
                dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
                if rank == 0 and received == 3:
                    sys.exit()
        except RuntimeError:
            print("it has left after", received)
    """
    says(run_program(text, 2, how), "it has left after 4")


@pytest.mark.parametrize("how", HOW)
def test_a_lock_that_a_rank_holds_to_its_end_is_let_go(run_program: Runs, how: str) -> None:
    text = """
        dist.init_process_group("gloo")
        dist.barrier()  # rank 0 may serve the store, which the other needs until it has begun
        lock = open("lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("has it")
    """
    says(run_program(text, 2, how), "has it", "has it")


@pytest.mark.parametrize("how", HOW)
def test_a_rank_may_wait_for_the_end_of_another(run_program: Runs, how: str) -> None:
    text = """
        dist.init_process_group("gloo")
        dist.barrier()  # rank 0 may serve the store, which the other needs until it has begun
        atexit.register(lambda: open(f"ended {rank}", "w").close())
        while rank == 1 and not os.path.exists("ended 0"):
            time.sleep(0.01)
    """
    says(run_program(text, 2, how))


def test_who_serves_the_store_stays_until_the_others_know_that_it_has_left(
    fork_program: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1, which is stopped while rank 0 ends, does not miss it when it goes on."""
    monkeypatch.chdir(tmp_path)
    text = """
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 0:
            atexit.register(lambda: open("ended", "w").close())
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(text))
    port = free_port()
    ranks = [
        fork_program("playground", "run", "train.py", **by_hand(rank, 2, port)) for rank in range(2)
    ]
    while not (tmp_path / "ended").exists() or state_of(ranks[1].pid) != "T":
        time.sleep(0.01)
    time.sleep(0.5)  # in which rank 0 would have gone
    os.kill(ranks[1].pid, signal.SIGCONT)
    says([finish(one) for one in ranks])


def test_threads_and_exit_functions_have_no_limit_of_ours(
    run_program: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playground.world.launcher import ending

    monkeypatch.setattr(ending, "LEAVE_LIMIT", 0.1)  # programs are forks of this process
    text = """
        def upload(what):
            time.sleep(1)
            print(what)
        threading.Thread(target=upload, args=("thread",)).start()
        atexit.register(upload, "at exit")
    """
    says(run_program(text, 1), "thread", "at exit")


@pytest.mark.parametrize("how", HOW)
def test_the_program_s_excepthook_is_called(run_program: Runs, how: str) -> None:
    text = """
        sys.excepthook = lambda kind, error, traceback: print("mine:", kind.__name__, error)
        dist.init_process_group("gloo")
        dist.barrier()  # one that raises sooner has its peer's hook called, too
        if rank == 1:
            raise ValueError("no")
        time.sleep(100)
    """
    ended = run_program(text, 2, how)
    assert "".join(each.out for each in ended) == "mine: ValueError no\n"
    assert "rank 1 of 2 failed: ValueError: no" in ended[-1].err


def test_a_failure_leaves_time_to_save(run_program: Runs, tmp_path: Path) -> None:
    """To the rank's own exit functions, and to the handlers of SIGTERM in the others, one of which
    prints more than a pipe holds."""
    text = """
        def save(*signal):
            print("x" * 100 * 1024)
            time.sleep(1.5)
            open(f"saved {rank}", "w").close()
            if signal:
                sys.exit()

        if rank == 1:
            signal.signal(signal.SIGTERM, save)
            open("ready", "w").close()
            time.sleep(100)
        while not os.path.exists("ready"):
            time.sleep(0.01)
        atexit.register(save)
        raise ValueError("no")
    """
    [ended] = run_program(text)
    # where a rank gets no core for a second, what it has printed of its line is shown
    assert (ended.code, ended.out.count("x")) == (1, 2 * 100 * 1024)
    assert sorted(file.name for file in tmp_path.glob("saved*")) == ["saved 0", "saved 1"]


def test_a_grace_is_the_limit_of_that(run_program: Runs, tmp_path: Path) -> None:
    text = """
        atexit.register(time.sleep, 100)
        raise ValueError("no")
    """
    [ended] = run_program(text, 1, "run", "--grace", "0.2")
    assert (ended.code, ended.out) == (1, "")
