"""why: a run that stands still is asked, and a process that is none of ours refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fixtures import Fork, Run
from processes import ENOUGH
from programs import SCRIPT, ForkedProgram
from widths import too_wide

from playground.explain.hang import Doing
from playground.explain.hang.box import Box, View, find_boxes
from playground.explain.hang.box_format import ANSWERS
from playground.explain.hang.workers import list_workers
from playground.tools.why import page
from playground.tools.why.family import list_family
from playground.tools.why.page import tell_more, words_of_ours
from playground.tools.why.stacks import (
    MAY_NOT,
    Stacks,
    describe_stacks,
    dump,
    find_py_spy,
    parse_dump,
    read_stacks,
)
from playground.tools.why.unrecorded import (
    Seen,
    UnrecordedRank,
    describe_activity,
    describe_workers,
)

STANDS_STILL = """
import time, torch, torch.distributed as dist
from playground import launch

def count():
    number = 0
    while True:
        number += 1

def multiply():
    matrix = torch.ones(1000, 1000)
    while True: torch.mm(matrix, matrix)

def run(rank, size):
    dist.barrier()
    if rank == 0:
        time.sleep(300)
    if rank == 1:
        count()
    if rank == 2:
        multiply()
    if rank == 3:
        sum(range(10**12))  # one call of C, which holds the interpreter's lock
    dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    launch(run, 6, timeout=300)
"""


def start_script(
    text: str, fork_program: Fork, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> ForkedProgram:
    """A program of this text, which launches ranks."""
    (folder / f"{SCRIPT}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return fork_program(SCRIPT)


def wait_for_ranks_in(operation: str, pid: int, count: int) -> None:
    deadline = time.monotonic() + ENOUGH
    while time.monotonic() < deadline:
        states = [box.read() for box in find_boxes(list_family(pid)) if box.world]
        waits = (state.waits_for for state in states if state.doing == Doing.IN_OPERATION)
        if sum(wait is not None and wait.name == operation for wait in waits) == count:
            return
        time.sleep(0.02)
    raise AssertionError("the ranks never came to the operation")


def test_a_run_is_asked_why_it_stands_still(
    run_cli: Callable[..., Any], fork_program: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start_script(STANDS_STILL, fork_program, tmp_path, monkeypatch)
    wait_for_ranks_in("all_reduce", program.pid, 2)
    told = run_cli("why", program.pid).out
    place = rf"{SCRIPT}\.py:"
    assert re.search(rf"^0 +in the program .+ {place}17 in run$", told, re.MULTILINE)
    assert re.search(rf"^1 +in the program .+ {place}[78] in count$", told, re.MULTILINE)
    assert re.search(rf"^2 +in the program .+ {place}12 in multiply$", told, re.MULTILINE)
    assert re.search(rf"^3 +in the program .+ {place}23 in run$", told, re.MULTILINE)
    assert re.search(rf"^4-5 +all_reduce #1 .+ {place}24 in run +0-3$", told, re.MULTILINE)
    assert "py-spy" not in told
    whose = rf"the ranks of process {program.pid}: python .*, started \d+ (s|min) ago "
    assert re.match(whose, " ".join(told.split()))


@pytest.mark.parametrize("count", [3, 4])
def test_of_many_worlds_each_is_told_in_a_line_and_finished_ones_are_left_out(
    count: int, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flight recorders of this process, of whose worlds one has finished."""
    boxes = []
    for number in range(count + 1):
        boxes.append(Box(0, 1, f"world {number}"))
        boxes[-1].begin_program()
    boxes[-1].end_program()
    own = [View(os.getpid(), box.file) for box in boxes]
    monkeypatch.setattr(page, "find_boxes", lambda _: own)
    told = run_cli("why", os.getpid()).out
    assert told.count("the ranks of process") == count
    assert (len(told.splitlines()) == count) == (count > 3), told


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        ("hrtimer_nanosleep", "sleeps (a timer)"),
        ("futex_do_wait", "waits (for another thread, as in a collective of gloo)"),
        ("inet_csk_accept", "waits (a socket)"),
        ("", "waits"),
    ],
)
def test_a_rank_that_sleeps_is_told_from_one_that_waits(wait: str, said: str) -> None:
    status = [b"S", *[b"0"] * 20]
    assert describe_activity(status, status, wait) == said


def test_of_a_rank_that_does_not_say_where_it_is_another_program_is_named() -> None:
    box = Box(0, 1, "a world")
    box.begin_program()
    box.words[ANSWERS] = 0
    view = View(os.getpid(), box.file)
    assert view.ask_for_line() == ""
    said = tell_more([view.read()], [view])
    assert [*said] == [f"where rank 0 is: py-spy dump --pid {os.getpid()} (pip install py-spy)"]


AGENT = """
import os, socket, subprocess, sys
store = socket.create_server(("127.0.0.1", 0))
port = str(store.getsockname()[1])
ranks = [
    subprocess.Popen(
        [sys.executable, "-u", *sys.argv[1:]],
        env=os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port,
        },
        stdout=subprocess.PIPE,
    )
    for rank in range(2)
]
print(*(rank.pid for rank in ranks if rank.stdout.readline()), flush=True)
sys.stdin.read()
for rank in ranks:
    rank.kill()
"""
TRAIN = """
import os, socket
store = socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])))
print("up", flush=True)
while True:
    if os.environ["RANK"] == "0":
        store.recv(1)
"""
STARTS = """
print("up", flush=True)
while True: pass
"""


@contextmanager
def start_agent(
    folder: Path, script: str, *words: str
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Two ranks with the processes, arguments and variables of torchrun's, and their numbers."""
    (folder / "train.py").write_text(script)
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, *words], cwd=folder, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as agent:  # fmt: skip
        assert agent.stdout
        try:
            yield agent, agent.stdout.readline().split()
        finally:
            agent.communicate()


def test_of_a_plain_script_under_torchrun_it_says_who_is_waited_for_and_what_tells_more(
    run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that computes is told from one that waits. Without py-spy, its command is told."""
    monkeypatch.setattr(page, "find_py_spy", lambda: None)
    with start_agent(tmp_path, TRAIN, "train.py", "--lr", "0.1") as (agent, (first, second)):
        elsewhere = run_cli("why", agent.pid)
        monkeypatch.chdir(tmp_path)
        there = run_cli("why", first)
        document = run_cli("why", agent.pid, "--json")
    assert (elsewhere.code, elsewhere.err) == (0, "")
    lines = elsewhere.out.splitlines()
    assert lines[1].startswith(f"rank 0 (process {first}) waits")
    assert lines[2:4] == [
        f"rank 1 (process {second}) computes",
        "the others probably wait for rank 1",
    ]
    run = "python -m playground run -n 2 train.py --lr 0.1"
    assert f"cd {tmp_path} && {run}\n" in elsewhere.out
    loop = f"for pid in {first} {second}; do py-spy dump --pid $pid; done"
    assert lines[-1].endswith(f"pip install py-spy, beside python, and ask again; or {loop}")
    assert f"start it by: {run}\n" in there.out
    assert "python -m playground doctor train.py --lr 0.1\n" in there.out
    assert "probably" not in there.out
    assert there.out.endswith(f"for pid in {first}; do py-spy dump --pid $pid; done\n")
    seen = json.loads(document.out)["unrecorded"]
    assert seen[1] == {"rank": 1, "process": int(second), "does": "computes", "stack": []}


def frame(file: str, line: int, name: str) -> dict[str, object]:
    return {"name": name, "filename": file, "line": line}


TORCH = "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py"
IN_LIBRARY = frame("/opt/python/lib/python3.12/threading.py", 9, "run")
EVALUATES = [
    frame(TORCH, 1794, "_call_impl"), frame("/home/ada/eval.py", 38, "evaluate"),
    frame("/home/ada/eval.py", 70, "main"), frame("/home/ada/eval.py", 77, "<module>"), IN_LIBRARY,
]  # fmt: skip
MEETS = [frame(TORCH, 9, "barrier"), frame("/home/ada/eval.py", 73, "main"), *EVALUATES[3:]]


def test_of_what_py_spy_prints_the_lines_of_the_program_are_told_once_for_equal_ranks() -> None:
    def lines_of(frames: list[dict[str, object]]) -> list[str]:
        threads = [
            {"os_thread_id": 5, "frames": [IN_LIBRARY]},
            {"os_thread_id": 4, "frames": frames},
        ]
        return parse_dump(json.dumps(threads), 4)

    begun = frame("/opt/python/lib/python3.12/multiprocessing/process.py", 314, "_bootstrap")
    assert lines_of([*EVALUATES[:2], begun, *MEETS]) == ["eval.py:38 in evaluate"]
    stacks = [lines_of(each) for each in (EVALUATES, MEETS, MEETS, [IN_LIBRARY])]
    assert stacks[0] == ["eval.py:38 in evaluate", "eval.py:70 in main", "eval.py:77 in <module>"]
    told = describe_stacks(Stacks(dict(enumerate(stacks)), {4: MAY_NOT}))
    assert told[:3] == [
        "  rank 0: eval.py:38 in evaluate, called in main :70",
        "  ranks 1-2: eval.py:73 in main",
        "  rank 3: in no line of the program",
    ]
    assert told[3].startswith("  rank 4: py-spy may not look at ranks: the system refuses it")


PY_SPY = """#!{python}
import sys
said = {{"9": "Permission Denied: Try running again", "8": "no process 8\\nStack backtrace:"}}
if "--nonblocking" in sys.argv and sys.argv[-1] == "7":
    sys.exit("it moves")
if sys.argv[-1] in said:
    sys.exit(said[sys.argv[-1]])
frame = dict(name="main", filename="/home/ada/eval.py", line=73)
pid = int(sys.argv[-1])
print([dict(os_thread_id=pid, frames=[frame])].__repr__().replace("'", '"'))
"""


def test_what_py_spy_may_not_read_is_said_and_what_moves_is_paused(tmp_path: Path) -> None:
    """By a program that answers as py-spy does."""
    program = tmp_path / "py-spy"
    program.write_text(PY_SPY.format(python=sys.executable))
    program.chmod(0o755)
    pids = {0: 6, 1: 7, 2: 8, 3: 9}
    assert dump(str(program), pids, "--nonblocking").found == {0: ["eval.py:73 in main"]}
    stacks = read_stacks(str(program), pids)
    assert stacks.found == {rank: ["eval.py:73 in main"] for rank in (0, 1)}
    assert stacks.errors == {2: "py-spy: no process 8", 3: MAY_NOT}


@pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed (pip install py-spy)")
def test_py_spy_tells_the_line_of_each_rank_or_that_the_system_refuses_it(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    with start_agent(tmp_path, TRAIN, "train.py") as (agent, _):
        told = run_cli("why", agent.pid).out
    is_told = re.search(r"^  rank 0: train\.py:[67] in <module>$", told, re.MULTILINE)
    assert is_told or "the system refuses it" in told, told
    assert "pip install py-spy" not in told


FORKS_WORKERS = """
import multiprocessing, os, socket, time
store = socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])))

def load():
    time.sleep(300)

for _ in range(2):
    multiprocessing.get_context("fork").Process(target=load, daemon=True).start()
print("up", flush=True)
store.recv(1)
"""


def test_workers_under_torchrun_are_told_as_workers_of_their_rank(
    run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the variables of their rank. With the PID of torchrun, and of a rank."""
    with start_agent(tmp_path, FORKS_WORKERS, "train.py") as (agent, (first, second)):
        told = [run_cli("why", pid) for pid in (agent.pid, first)]
        document = json.loads(run_cli("why", agent.pid, "--json").out)
        monkeypatch.setattr(page, "find_py_spy", lambda: None)
        without = run_cli("why", agent.pid).out
    for each, ranks in zip(told, ([first, second], [first]), strict=True):
        assert (each.code, each.err) == (0, "")
        seen = re.findall(r"^rank \d \(process (\d+)\)", each.out, re.MULTILINE)
        assert seen == ranks
        assert each.out.count("worker of rank 0 (process ") == 2, each.out
    ranks, workers = document["unrecorded"], document["workers"]
    assert [each["process"] for each in ranks] == [int(first), int(second)]
    assert sorted(each["rank"] for each in workers) == [0, 0, 1, 1]
    pids = {first, second, *(str(each["process"]) for each in workers)}
    [loop] = re.findall(r"for pid in ([\d ]+); do", without)
    assert (len(pids), {*loop.split()}) == (6, pids)
    assert without.count("worker of rank 1 (process ") == 2


def test_of_workers_those_in_the_program_are_told_with_their_lines_and_others_counted() -> None:
    workers = [UnrecordedRank(pid, {"RANK": str(pid % 2)}, ["train.py"]) for pid in (10, 11, 13)]
    stacks = Stacks({10: [], 11: ["data.py:18 in fetch", "data.py:35 in __getitem__"]}, {13: "no"})
    told = [*describe_workers(Seen(workers, ["waits"] * 3, stacks))]
    assert told == [
        "worker of rank 1 (process 11) waits: data.py:18 in fetch, called in __getitem__ :35",
        "worker of rank 1 (process 13) waits",
        "1 worker in no line of the program",
    ]


def test_ranks_of_several_torchruns_are_not_told_as_those_of_one(
    run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "has_boxes", lambda _: False)  # this process may have some
    with start_agent(tmp_path, STARTS, "train.py"), start_agent(tmp_path, STARTS, "train.py"):
        told = run_cli("why", os.getpid())
    assert (told.code, told.out) == (2, "")
    assert "has ranks of several runs: give the PID of a torchrun" in told.err


def test_a_rank_under_torchrun_that_has_met_nobody_is_not_said_to_compute(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    with start_agent(tmp_path, STARTS, "train.py") as (agent, _):
        told = run_cli("why", agent.pid).out
    assert told.count(" starts (it has not met the others so far)\n") == 2
    assert "computes" not in told


def test_of_ranks_of_torchrun_that_start_or_will_keep_a_flight_recorder_it_says_to_ask_again(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    """Of ranks of a module `playground`, and of a torchrun that has started none yet."""
    (tmp_path / "playground.py").write_text(STARTS)
    words = ["-m", "playground", "run", "train.py"]
    with start_agent(tmp_path, TRAIN, *words) as (agent, (first, _)):
        told = [(pid, run_cli("why", pid)) for pid in (agent.pid, first)]
    with start_waiting(tmp_path, "torchrun", "") as torchrun:
        told.append((torchrun.pid, run_cli("why", torchrun.pid)))
    for pid, each in told:
        said = f"playground: the ranks of process {pid} are starting: ask again\n"
        assert (each.code, each.out) == (2, "")
        assert each.err.endswith(said.removeprefix("playground: ")), each.err


@contextmanager
def start_waiting(
    folder: Path, name: str, does: str, *words: str
) -> Iterator[subprocess.Popen[str]]:
    """A process of a script of this name, that has done what the text says, and waits."""
    (folder / name).write_text(
        f"import os, sys, time\n{does}\nprint(1, flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-X", "dev", folder / name, *words], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout
        process.stdout.readline()
        try:
            yield process
        finally:
            process.communicate()


HAS_HAD_RANKS = """
if not os.fork():
    while time.process_time() < 0.5: pass
    os._exit(1)
os.wait()
"""


def test_of_a_torchrun_whose_ranks_have_ended_it_says_that_there_are_none_any_more(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    with start_waiting(tmp_path, "torchrun", HAS_HAD_RANKS, "train.py") as torchrun:
        told = run_cli("why", torchrun.pid)
    assert (told.code, told.out) == (2, "")
    assert f"process {torchrun.pid} has no ranks any more: what it prints" in told.err


def test_a_run_that_starts_is_known_by_its_command(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    with start_waiting(tmp_path, "playground", "", "run", "-n", "3", "train.py") as process:
        told = run_cli("why", process.pid)
    assert (told.code, told.out) == (2, "")
    assert f"the run of process {process.pid} is starting: ask again" in told.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python -m playground run train.py", ["run", "train.py"]),
        ("python3 -u -X dev -m playground why", ["why"]),
        ("python /venv/bin/playground run -n 3 train.py", ["run", "-n", "3", "train.py"]),
        ("python train.py -m playground run", []),
        ("python -m playgrounds run", []),
        ("vim", []),
    ],
)
def test_a_command_of_ours_is_known_by_its_words(line: str, words: list[str]) -> None:
    assert [*words_of_ours(line.split())] == words


def test_several_runs_are_listed_one_to_a_line_and_of_ranks_of_one_world_one(
    run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(0, 1, "a world")
    box.begin_program()
    other = Box(0, 1, "another world")
    other.begin_program()
    own, of_other = (View(os.getpid(), each.file) for each in (box, other))
    boxes = {11: own, 12: of_other, 13: of_other}
    monkeypatch.setattr(page, "find_boxes", lambda pids: [boxes[pid] for pid in pids])
    monkeypatch.setattr(page, "list_family", lambda pid: [pid])
    monkeypatch.setattr(page, "list_processes", lambda: [11, 12, 13])
    monkeypatch.setattr(page, "find_command", lambda _: "run -n 4 " + "--long " * 20)
    told = run_cli("why").err
    assert not too_wide(told, 80), told
    assert [line.split()[:2] for line in told.splitlines()[-2:]] == [["11", "run"], ["12", "run"]]


WAITS_FOR_WORKER = """
import time, torch, torch.distributed as dist
from torch.utils.data import DataLoader
from playground import launch

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        while i == 1:
            time.sleep(1)
        return i

def run(rank, size):
    dist.barrier()
    if rank == 0:
        for i in DataLoader(Slow(), num_workers=2):
            pass
    dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    launch(run, 2, timeout=300)
"""


def test_a_rank_that_waits_for_a_worker_of_its_loader_is_told_with_that_worker(
    run_cli: Callable[..., Any], fork_program: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start_script(WAITS_FOR_WORKER, fork_program, tmp_path, monkeypatch)
    wait_for_ranks_in("all_reduce", program.pid, 1)
    deadline = time.monotonic() + ENOUGH
    told = ""
    while "waits for a DataLoader worker (process" not in told and time.monotonic() < deadline:
        told = run_cli("why", program.pid).out
    said = " ".join(told.split())
    [rank] = [box.pid for box in find_boxes(list_family(program.pid)) if box.read().rank == 0]
    place = rf"{SCRIPT}\.py:10 \(its loop: {SCRIPT}\.py:16\)"
    [worker] = re.findall(
        rf"waits for a DataLoader worker \(process (\d+)\), which sleeps at {place}", said
    )
    assert int(worker) in list_workers(rank)
    assert re.search(rf"^0 +waits for a worker .+ {SCRIPT}\.py:16 in run$", told, re.MULTILINE)
    assert told.endswith("look at what the worker does there: the others wait for its rank\n")


def test_a_process_that_is_none_of_ours_is_refused_in_a_line(run_cli: Callable[..., Any]) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        result = run_cli("why", process.pid)
        process.kill()
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "has started no ranks" in result.err


PAGE = Path(str(page.__file__)).with_name("README.md")


def test_the_page_s_script_is_told_of_as_the_page_shows(
    run_cli: Run, fork_program: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of torchrun with `-m playground run` differs in its command alone."""
    text = PAGE.read_text(encoding="utf-8")
    [script] = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    by_run, by_torchrun, alone = re.findall(
        r"^\$ python -m playground why 4711\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    program = fork_program("playground", "run", "-n", 3, "train.py")
    wait_for_ranks_in("barrier", program.pid, 2)
    told = run_cli("why", program.pid).out

    def form(each: str) -> str:
        answer = each[each.index("rank 0 is in") :]
        return re.sub(r" +", " ", re.sub(r"\d+\.\d s", "0.5 s", answer))

    assert form(told) == form(by_run) == form(by_torchrun)
    stacks = [["train.py:6 in save", "train.py:9 in <module>"], *[["train.py:10 in <module>"]] * 2]
    assert "\n".join(describe_stacks(Stacks(dict(enumerate(stacks)), {}))) in alone
    assert "rank 0 (process 14376) sleeps (a timer)\n" in alone
