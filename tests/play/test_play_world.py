"""Ranks that stay: what cells return and raise, hangs that are named and ended, ranks that are
replaced; and variables, which outlive all that."""

from __future__ import annotations

import ast
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import ENOUGH, is_alive, links

from playground.base.errors import UsageError
from playground.base.remote import file_of
from playground.explain.hang import Kind
from playground.play import cells, world as play_world
from playground.play.text_report import describe_end, describe_values
from playground.play.world import PlayWorld, Run
from playground.tools.failures.programs import DEADLOCK, FAILURE, PROGRAMS, TIMEOUT, find
from playground.world.launcher import examiner
from playground.world.simulated_gpu.environment import GPUS

SIZE = 3


@pytest.fixture(scope="module")
def world() -> Iterator[PlayWorld]:
    world = PlayWorld(SIZE)
    yield world
    processes = [rank.process.pid for rank in world.ranks]
    world.close()
    assert not any(map(is_alive, processes))


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> None:
    """As in `play`, also where the shell that has started the tests ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests/conftest.py restores it


def told(run: Run, size: int = SIZE) -> list[str]:
    return [*describe_values(run, size), *describe_end(run, size)]


def unwrapped(run: Run) -> str:
    """What is told, in one line."""
    return " ".join(" ".join(told(run)).split())


def values(run: Run) -> list[object]:
    return [run.outcomes[rank].value for rank in sorted(run.outcomes)]


def interrupt(seconds: float) -> threading.Timer:
    """Press Ctrl-C, later."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def interrupt_when(is_time: Callable[[], bool], later: float = 0.0) -> threading.Thread:
    """Press Ctrl-C as soon as this is so, or some seconds later."""

    def press() -> None:
        while not is_time():
            time.sleep(0.01)
        time.sleep(later)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    return thread


def count_waiting(world: PlayWorld) -> int:
    return sum(bool(rank.box and rank.box.waits) for rank in world.ranks)


@pytest.fixture
def _frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the examiner, who names a hang half a second earlier by them; on a busy machine it may
    find fewer ranks that wait."""
    monkeypatch.setattr(examiner, "INTERVAL", 0.02)


SOME_OF = {"0-1": "(ranks 0-1 are|rank [01] is)", "0, 2": "(ranks 0, 2 are|rank [02] is)"}
"""Ranks that wait: one of them is enough."""


def test_equal_values_are_told_once_and_different_ones_by_rank(world: PlayWorld) -> None:
    run = world.run_cell("x = torch.tensor([10.0 ** rank]); dist.all_reduce(x); x")
    assert told(run) == ["[0-2] tensor([111.])"]
    run = world.run_cell("torch.full((2, 1), float(rank)) if rank else 'none'")
    assert told(run)[:3] == ["[0]   'none'", "[1]   tensor([[1.],", "              [1.]])"]
    assert told(run)[3:] == ["[2]   tensor([[2.],", "              [2.]])"]
    assert told(world.run_cell("size;")) == []
    assert told(world.run_cell("y = 3")) == []
    assert told(world.run_cell("")) == []
    long = told(world.run_cell("print('one line')\nlist(range(rank, 5000))"))
    assert sum(map(len, long)) < 3 * 450
    assert "%out 2" in long[-1]
    equal = told(world.run_cell("list(range(5000))"))
    assert equal[0].startswith("[0-2] [0, 1, 2")
    assert [line for line in equal if line.startswith("[")] == equal[:1]


def test_ranks_that_a_cell_was_not_for_have_not_finished_it(world: PlayWorld) -> None:
    said = " ".join(told(world.run_cell("dist.barrier()", on=[0])))
    said = " ".join(said.split())
    assert "ranks 1-2 do not run this cell (%on 0)" in said
    assert "fix: run the cell on the ranks that have to meet: %on all" in said
    assert "finished" not in said
    assert "is in barrier" in world.state  # which %why shows


def test_every_rank_s_shape_is_told_once(world: PlayWorld) -> None:
    said = unwrapped(world.run_cell("dist.all_reduce(torch.ones(rank + 1))"))
    assert all(f"of shape [{size}]" in said for size in (1, 2, 3))
    assert "before that" not in said


CLASSES = """\
import dataclasses

def double(n):
    return 2 * n

class Point:
    def __init__(self, x):
        if x < 0: raise ValueError(x)
        self.x = x
    class Origin: ...

@dataclasses.dataclass
class Pair:
    a: int
"""


def test_what_a_cell_defines_is_there_in_the_next(world: PlayWorld) -> None:
    world.run_cell("class Pair: ...", number=1)
    world.run_cell(CLASSES, number=2)
    for name, text in (
        ("double", "def double(n):\n    return 2 * n\n"),
        ("Point", CLASSES[CLASSES.index("class Point") : CLASSES.index("\n@data")]),
        ("Point.Origin", "    class Origin: ...\n"),
        ("Pair", CLASSES[CLASSES.index("@dataclasses") :]),
    ):
        run = world.run_cell(f"import inspect; inspect.getsource({name}).rstrip()")
        assert values(run) == [repr(text.rstrip())] * SIZE
    lines = told(world.run_cell("Point(-1)", number=3))
    assert [line.strip() for line in lines if "cell" in line] == [
        'File "cell 3", line 1, in <module>',
        'File "cell 2", line 8, in __init__',
    ]


def test_what_a_cell_defines_is_sent(world: PlayWorld) -> None:
    world.run_cell(CLASSES, number=2)
    gathered = world.run_cell(
        "points = [None] * size\ndist.all_gather_object(points, Point(double(rank)))\n"
        "[point.x for point in points]"
    )
    assert told(gathered) == ["[0-2] [0, 2, 4]"]
    sent = world.run_cell(
        "box = [Pair(rank), Point.Origin]\n"
        "if rank == 0: dist.send_object_list(box, 1)\n"
        "if rank == 1: dist.recv_object_list(box, 0)\n"
        "box[0], isinstance(box[1](), Point.Origin)"
    )
    assert told(sent) == [
        "[0-1] (Pair(a=0), True)",
        "[2]   (Pair(a=2), True)",
    ]
    loaded = world.run_cell(
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return Pair(i * i)\n\n"
        "def collate(pairs): return Point(sum(pair.a for pair in pairs))\n\n"
        "loader = torch.utils.data.DataLoader(\n"
        "    Squares(), 2, collate_fn=collate, num_workers=1, multiprocessing_context='fork')\n"
        "[point.x for point in loader]"
    )
    assert told(loaded) == ["[0-2] [1, 13]"]


def test_an_exception_is_told_once_with_its_line_and_the_others_keep_their_values(
    world: PlayWorld,
) -> None:
    lines = told(world.run_cell("a = 1\na / rank if rank != 2 else 5 / 0", number=7))
    assert lines[0] == "[1]   1.0"
    assert lines.count("[0]   Traceback (most recent call last):") == 1
    assert '        File "cell 7", line 2, in <module>' in lines
    assert not any("playground" in line for line in lines)
    lines = told(world.run_cell("None.nothing"))
    assert [line for line in lines if "Traceback" in line] == [
        "[0-2] Traceback (most recent call last):"
    ]
    assert "SyntaxError" in told(world.run_cell("1 +"))[-1]
    assert "SystemExit" in told(world.run_cell("import sys; sys.exit(3)"))[-1]


def test_some_ranks_run_a_cell(world: PlayWorld) -> None:
    assert told(world.run_cell("rank", on=(0, 2))) == ["[0]   0", "[2]   2"]
    with pytest.raises(UsageError, match="3 in a world of 3"):
        world.run_cell("rank", on=(0, 3))


@pytest.mark.usefixtures("_frequent_looks")
def test_a_hang_is_named_and_ended_and_variables_are_as_they_were(world: PlayWorld) -> None:
    world.run_cell("x = torch.tensor([111.0]); processes = [0] * size")
    before = world.pull("os.getpid()" if values(world.run_cell("import os")) else "")
    for number in (3, 4):
        run = world.run_cell("if rank != 2: dist.barrier()", number)
        assert told(run)[0].startswith("deadlock after")
        waiting = rf"{SOME_OF['0-1']} in barrier \(cell {number}, line 1\)"
        words = unwrapped(run)
        assert re.search(f"rank 2 has finished the cell where {waiting}", words)
        assert f"fix: ranks 0-1 make a call (cell {number}, line 1) that rank 2 does not" in words
        assert run.seconds < 5
        assert told(world.run_cell("dist.all_reduce(y := x.clone()); x, y")) == [
            "[0-2] (tensor([111.]), tensor([333.]))"
        ]
    assert world.pull("os.getpid()") == before


@pytest.mark.usefixtures("_frequent_looks")
def test_a_call_that_others_have_not_made_is_named_although_all_are_past_it(
    world: PlayWorld,
) -> None:
    lines = "if rank == 0: dist.all_reduce(torch.ones(2))", "dist.all_reduce(torch.ones(2))"
    run = world.run_cell("\n".join([*lines, "dist.barrier()"]), 3)
    words = unwrapped(run)
    assert re.search(r"deadlock after .* in barrier \((cell 3, )?line 3\)", words)
    assert "before that: rank 0 has called all_reduce (cell 3, line 1), which" in words


@pytest.mark.usefixtures("_frequent_looks")
def test_it_is_said_which_groups_are_gone(world: PlayWorld) -> None:
    world.run_cell("group = dist.new_group([0, 1])")
    run = world.run_cell("if rank == 0: dist.all_reduce(torch.ones(1), group=group)")
    assert "Groups made with new_group are gone: make them again." in unwrapped(run)
    for call in ("all_reduce(torch.ones(1), ", "broadcast(torch.ones(1), group_src=0, "):
        [line] = told(world.run_cell(f"if rank < 2: dist.{call}group=group)", 8))
        assert line.startswith("[0-1] cell 8, line 1: this group is gone since")
    # and leaves nothing unknown
    assert world.run_cell("dist.all_reduce(torch.ones(1 + rank))").hang
    assert not any("new_group" in line for line in told(world.run_cell("1 / 0")))
    world.run_cell("group = dist.new_group([0, 1])")
    run = world.run_cell(
        "z = torch.ones(1)\nif rank < 2: dist.all_reduce(z, group=group)\nz.item()"
    )
    assert told(run) == ["[0-1] 2.0", "[2]   1.0"]


def test_errors_that_differ_in_addresses_only_are_told_once(world: PlayWorld) -> None:
    source = "raise ValueError(f'peer [127.0.0.1]:{4000 + rank} of {object() if rank else 0x7f}')"
    assert sum("Traceback" in line for line in told(world.run_cell(source))) == 2
    source = "raise ValueError(f'peer [127.0.0.1]:{4000 + rank}, object at {hex(rank)}')"
    assert sum("Traceback" in line for line in told(world.run_cell(source))) == 1


@pytest.mark.usefixtures("_frequent_looks")
def test_a_rank_that_raises_is_told_before_those_that_wait_for_it(world: PlayWorld) -> None:
    run = world.run_cell("if rank == 1: raise ValueError('damaged')\ndist.barrier()")
    lines = told(run)
    assert lines[0] == "[1]   Traceback (most recent call last):"
    assert sum("Traceback" in line for line in lines) == 1
    waiting = f"{SOME_OF['0, 2']} in barrier"
    words = unwrapped(run)
    assert re.search(f"rank 1 has raised an error where {waiting}", words)
    assert re.search(r"1 +raised ", words)
    assert "fix: mend the error of rank 1, above" in words


@pytest.mark.usefixtures("_frequent_looks")
def test_a_cell_may_form_the_process_group_and_destroy_it(world: PlayWorld) -> None:
    """As a program for torchrun does that is pasted into a cell; and again after it has failed."""
    form = "dist.init_process_group('gloo'); group = dist.new_group([0, 1])"
    work = "t = torch.ones(1); dist.all_reduce(t); t.item()"
    for source in (f"{form}; 1 / 0", f"{form}; {work}"):
        run = world.run_cell(source)
        assert not run.has_left
    assert told(run) == ["[0-2] 3.0"]
    run = world.run_cell(f"{work}\ndist.destroy_process_group()")
    assert run.has_left
    assert "destroyed the process group: the ranks have formed another one." in unwrapped(run)
    assert "Groups made with new_group are gone" in unwrapped(run)
    run = world.run_cell(f"dist.destroy_process_group()\n{form}\nif rank: dist.barrier()")
    assert run.hang
    assert told(world.run_cell(work)) == ["[0-2] 3.0"]


def test_messages_pass_from_one_cell_to_the_next(world: PlayWorld) -> None:
    world.run_cell("t = torch.ones(1) * rank\nif rank == 0: work = dist.isend(t + 7, 1)")
    run = world.run_cell("if rank == 1: dist.recv(t, 0)\nif rank == 0: work.wait()\nt.item()")
    assert told(run) == ["[0]   0.0", "[1]   7.0", "[2]   2.0"]


@pytest.mark.usefixtures("_frequent_looks")
def test_a_call_that_one_rank_has_more_is_named_in_a_later_cell(world: PlayWorld) -> None:
    world.run_cell("ahead = dist.barrier(async_op=True) if rank == 0 else None")
    run = world.run_cell("dist.all_reduce(torch.ones(1))")
    assert run.hang
    assert run.hang.kind == Kind.COLLECTIVES


def test_ctrl_c_ends_a_cell_that_computes_and_leaves_groups(
    world: PlayWorld, tmp_path: Path
) -> None:
    world.run_cell("group = dist.new_group([0, 1]); kept = 5")
    pressed = interrupt_when(lambda: len(os.listdir(tmp_path)) == SIZE)
    source = f"import time\nopen(f'{tmp_path}/{{rank}}', 'w').close(); time.sleep(60)"
    lines = told(world.run_cell(source, number=9))
    pressed.join()
    assert lines[0].startswith("interrupted after")
    assert lines[1] == "[0-2] cell 9, line 2"
    run = world.run_cell("t = torch.ones(1)\nif rank < 2: dist.all_reduce(t, group=group)\nkept")
    assert told(run) == ["[0-2] 5"]


LOOPS = (
    "while True: dist.all_reduce(t)",
    "while True: dist.all_reduce(t, async_op=True).wait()",
    "while True:\n"
    "    work = dist.isend(t, (rank + 1) % size)\n"
    "    dist.recv(torch.empty(10_000), (rank - 1) % size); work.wait()",
)


def check_loop(world: PlayWorld, loop: str, seconds: float) -> None:
    world.run_cell("kept, t = 7, torch.ones(10_000)")
    timer = interrupt(seconds)
    run = world.run_cell(loop)
    timer.join()
    assert run.places
    assert not run.lost
    assert told(world.run_cell("dist.barrier(); kept")) == ["[0-2] 7"]


def test_ctrl_c_ends_a_loop_of_collectives(world: PlayWorld) -> None:
    """Connections that are shut down while data moves would leave a rank in gloo for ever."""
    check_loop(world, LOOPS[0], 0.3)


@pytest.mark.stress
@pytest.mark.parametrize("loop", LOOPS)
def test_ctrl_c_ends_loops_at_any_time(world: PlayWorld, loop: str) -> None:
    for times in range(30):
        check_loop(world, loop, 0.3 + 0.01 * times)


def test_ctrl_c_ends_a_cell_that_waits_for_a_rank_that_sleeps(
    world: PlayWorld, tmp_path: Path
) -> None:
    pressed = interrupt_when(lambda: bool(os.listdir(tmp_path)) and count_waiting(world) == 2)
    sleep = f"(open('{tmp_path}/begun', 'w').close(), time.sleep(60))"
    run = world.run_cell(f"import time; kept = 6\ndist.barrier() if rank else {sleep}", number=9)
    pressed.join()
    assert told(run)[1:3] == ["[0]   cell 9, line 2", "[1-2] barrier (cell 9, line 2)"]
    assert "straggler" in world.state or "in the program" in world.state
    assert told(world.run_cell("dist.barrier(); kept")) == ["[0-2] 6"]


def test_a_rank_that_takes_no_notice_of_ctrl_c_is_replaced(
    world: PlayWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play_world, "PATIENCE", 0.7)
    world.run_cell("kept = 7; import time")
    pressed = interrupt_when(
        lambda: bool(os.listdir(tmp_path)) and world.ranks[0].done and world.ranks[2].done
    )
    run = world.run_cell(
        "while rank == 1:\n"
        f"    try: open('{tmp_path}/begun', 'w').close(); time.sleep(60)\n"
        "    except KeyboardInterrupt: pass"
    )
    pressed.join()
    assert run.lost == {1: "did not come out of the cell"}
    assert told(world.run_cell("globals().get('kept')")) == ["[0,2] 7"]


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_dies_is_replaced(world: PlayWorld, rank: int) -> None:
    world.run_cell("kept = 8; import os, signal")
    kill = f"if rank == {rank} and 'kept' in globals(): os.kill(os.getpid(), signal.SIGKILL)"
    lines = told(run := world.run_cell(f"{kill}\ndist.barrier()\nrank", number=5))
    assert lines[0] == f"rank {rank} was killed by SIGKILL"
    assert f"A new process is in the place of rank {rank}: its variables are gone." in (
        unwrapped(run)
    )
    assert run.lost.keys() == {rank}
    assert values(world.retry()) == ["0", "1", "2"]
    kept = [rank_ for rank_ in range(SIZE) if rank_ != rank]
    run = world.run_cell("globals().get('kept')")
    assert [each for each in run.outcomes if run.outcomes[each].value == "8"] == kept


def test_the_store_of_a_world_that_was_mended_hears_its_ranks_alone(world: PlayWorld) -> None:
    world.run_cell("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    imports = (
        "from playground.world.rank.member import members",
        "from playground.world.rendezvous.keys import ALONE",
    )
    run = world.run_cell("\n".join([*imports, "dist.barrier()", "members[0].store.get(ALONE)"]))
    assert values(run) == ["b''"] * SIZE


def test_a_rank_that_dies_between_cells_is_replaced(world: PlayWorld) -> None:
    os.kill(world.ranks[2].process.pid, signal.SIGKILL)
    world.ranks[2].process.join(10)
    run = world.run_cell("dist.barrier(); rank")
    assert run.lost == {2: "was killed by SIGKILL"}
    assert values(run) == ["0", "1", "2"]
    run = world.run_cell("import os\nif rank == 1: os._exit(0)\ndist.barrier()")
    assert run.lost == {1: "exited with code 0"}


@pytest.mark.gpu
@pytest.mark.stress
@pytest.mark.skipif(GPUS in os.environ, reason="on simulated GPUs this deadlock is proved")
def test_ctrl_c_ends_a_wait_for_a_gpu() -> None:
    """On a GPU no deadlock is proved, as what it does is not seen: the communicators are
    aborted."""
    world = PlayWorld(2, "nccl")
    try:
        world.run_cell("t = torch.ones(3, device=device); dist.all_reduce(t)")
        processes = [rank.process.pid for rank in world.ranks]
        for wait in ("dist.all_reduce(t.clone()); torch.cuda.synchronize()", "dist.barrier()"):
            timer = interrupt(5.0)
            run = world.run_cell(f"if rank == 0: {wait}", number=2)
            timer.join()
            assert run.places
            assert not run.lost
            run = world.run_cell("s = t.clone(); dist.all_reduce(s); s.tolist()")
            assert told(run, 2) == ["[0-1] [4.0, 4.0, 4.0]"]
        assert [rank.process.pid for rank in world.ranks] == processes
    finally:
        world.close()


def test_values_are_moved_to_ranks_and_back(world: PlayWorld) -> None:
    world.push(b=[1, 2])
    world.push(on=(1,), b=[3])
    assert world.pull("b") == [[1, 2], [3], [1, 2]]
    assert [each.tolist() for each in world.pull("torch.ones(2) * rank")][1:] == [[1, 1], [2, 2]]
    with pytest.raises(UsageError, match="NameError"):
        world.pull("nothing_of_the_kind")


class Person:
    """Types, rank by rank, what it has been told to; then it presses Ctrl-D."""

    def __init__(self, **answers: list[str]) -> None:
        self.answers = {int(name.removeprefix("rank")): lines for name, lines in answers.items()}
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        lines = self.answers.get(int(prompt[1]), [])
        if not lines:
            raise EOFError
        if lines[0] == "Ctrl-C":
            raise KeyboardInterrupt
        return lines.pop(0)


def test_ranks_ask_one_after_the_other(world: PlayWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    person = Person(rank0=["a", "b"], rank2=["c", "d"])
    monkeypatch.setattr("builtins.input", person)
    run = world.run_cell(
        "names = [input(f'name {i}? ') for i in range(2)] if rank != 1 else []\n"
        "dist.barrier(); names"
    )
    assert told(run) == ["[0]   ['a', 'b']", "[1]   []", "[2]   ['c', 'd']"]
    assert sorted(person.prompts) == [f"[{rank}] name {i}? " for rank in (0, 2) for i in range(2)]
    run = world.run_cell("input()", number=4, on=(1,))
    assert told(run)[-1] == "      EOFError: EOF when reading a line"
    assert sum("File" in line for line in told(run)) == 1
    forked = "import os\nif not os.fork():\n    try: input()\n    except EOFError: os._exit(7)\n"
    run = world.run_cell(forked + "os.waitstatus_to_exitcode(os.wait()[1])")
    assert told(run) == ["[0-2] 7"]


@pytest.mark.parametrize("question", ["input()", "breakpoint()", "dist.breakpoint(1)"])
def test_ctrl_c_in_a_question_ends_the_cell(
    world: PlayWorld, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    monkeypatch.setattr("builtins.input", Person(rank1=["Ctrl-C"]))
    run = world.run_cell(f"kept = 9\nif rank == 1: {question}\ndist.barrier()", number=6)
    lines = told(run)
    assert lines[0].startswith("interrupted after")
    assert "[1]   cell 6, line 2" in lines
    assert not run.lost
    assert told(world.run_cell("dist.barrier(); kept")) == ["[0-2] 9"]


def test_a_rank_is_debugged(
    world: PlayWorld, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    person = Person(rank0=["n", "p (rank, n)", "c"], rank2=["p (rank, n)", "u", "q"])
    monkeypatch.setattr("builtins.input", person)
    run = world.run_cell(
        "def double(n):\n    breakpoint()\n    n *= 2\n    return n\n\n"
        "m = double(rank) if rank != 1 else 0\nm",
        number=8,
    )
    lines = capfd.readouterr().out.splitlines()
    double, where = ["> cell 8(3)double()", "-> n *= 2"], "> cell 8(6)<module>()"
    after = ["> cell 8(4)double()", "-> return n", "(0, 0)"]
    assert [line[4:] for line in lines if line.startswith("[0] ")] == [*double, *after]
    up = ["(2, 2)", where, "-> m = double(rank) if rank != 1 else 0"]
    assert [line[4:] for line in lines if line.startswith("[2] ")] == [*double, *up]
    assert set(person.prompts) == {"[0] (Pdb) ", "[2] (Pdb) "}
    assert {rank: one.value for rank, one in run.outcomes.items()} == {0: "0", 1: "0", 2: None}
    assert told(run)[-1] == "      bdb.BdbQuit"
    # who steps out of a cell is not asked in the next one
    monkeypatch.setattr("builtins.input", Person(rank0=["n"] * 3))
    world.run_cell("if rank == 0: breakpoint()\nm = 1")
    monkeypatch.setattr("builtins.input", Person())
    assert told(world.run_cell("n = 4\n(m, n)")) == ["[0-2] (1, 4)"]


def test_functions_of_the_notebook_say_where_they_are(world: PlayWorld) -> None:
    lines = told(world.run_cell("pull('rank')"))
    assert lines[-2].endswith("NameError: name 'pull' is not defined")
    assert lines[-1].endswith("pull() is called in this process: begin the cell with %%here")


def test_names_are_completed_and_explained(world: PlayWorld) -> None:
    world.run_cell("a_name_of_mine = torch.ones(1)")
    assert world.complete("a_name_of") == ["a_name_of_mine"]
    assert "a_name_of_mine.all" in world.complete("a_name_of_mine.al")
    assert world.complete("nothing_of_the_kind.x") == []
    assert world.call(cells.explain, "dist.barrier", False, on=(0,))[0].startswith("function: ")
    status = world.call(cells.find_status)
    assert "a_name_of_mine" in status[0].names
    assert [each.process for each in status] == [rank.process.pid for rank in world.ranks]


def test_what_ranks_call_differently_is_told_although_it_works(world: PlayWorld) -> None:
    run = world.run_cell(
        "t = torch.ones(2, dtype=torch.int32 if rank == 1 else torch.float32)\ndist.all_reduce(t)"
    )
    assert run.differing
    assert run.differing.kind == Kind.DTYPES
    assert [[one.name for one in run.operations[rank]] for rank in range(SIZE)] == [
        ["all_reduce"]
    ] * SIZE
    assert world.run_cell("t = torch.ones(1); dist.all_reduce(t)").differing is None


def counted(run: Run) -> list[tuple[int, int]]:
    """What each rank has counted."""
    return [ast.literal_eval(str(value)) for value in values(run)]


@pytest.mark.usefixtures("_frequent_looks")
def test_hangs_leave_nothing() -> None:
    """After each rank 0 has one more store for a second, whose thread looks once in that time."""
    count = "import threading; len(os.listdir('/proc/self/fd')), threading.active_count()"
    hang = "import os\nif rank != 1: dist.all_reduce(torch.ones(1))"
    world = PlayWorld(SIZE)
    try:
        world.run_cell(hang)
        before = counted(world.run_cell(count))
        for _ in range(5):
            assert world.run_cell(hang).hang
        deadline = time.monotonic() + ENOUGH
        while not all(
            files <= files_before and threads <= threads_before
            for (files, threads), (files_before, threads_before) in zip(
                counted(world.run_cell(count)), before, strict=True
            )
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        world.close()


def as_cell(name: str) -> str:
    """A program of `break`, to be typed."""
    function = find(name)
    text = file_of(function.module).read_text(encoding="utf-8")
    return f"{text}\n{function.name}(rank, size)"


def run_program(world: PlayWorld, name: str) -> Run:
    """Run a program, and press Ctrl-C when the others wait, if it cannot be proved that they wait
    in vain."""
    if PROGRAMS[name].symptom != TIMEOUT:
        return world.run_cell(as_cell(name), number=3)
    stops = name == "stopped"
    pressed = interrupt_when(
        lambda: (
            count_waiting(world) >= SIZE - 1
            and stops == any(rank.is_stopped() for rank in world.ranks)
        ),
        later=0.1,
    )
    run = world.run_cell(as_cell(name), number=3)
    pressed.join()
    return run


def check_program(world: PlayWorld, name: str) -> None:
    """A program of `break` is named as `break` names it, and the ranks are as they were."""
    world.run_cell("before = torch.arange(5)")
    processes = [rank.process.pid for rank in world.ranks]
    run, expected = run_program(world, name), PROGRAMS[name]
    words = (name, told(run), world.state)
    assert bool(run.hang) == (expected.symptom == DEADLOCK), words
    assert run.lost.keys() == LOSES.get(name, set()), words
    if run.hang:
        assert (run.hang.kind, [*run.hang.culprits]) == (
            expected.words,
            [*expected.culprits(SIZE)],
        )
    elif expected.symptom == TIMEOUT:
        assert [*run.places] == [*range(SIZE)], words
        [kind] = (kind for kind in Kind if kind == expected.words)
        assert kind.cure in " ".join(world.state.split()), words
    elif expected.symptom == FAILURE:
        assert expected.words in "\n".join(told(run)), words
    else:
        assert bool(run.differing) == bool(expected.words), words
        assert not any(outcome.error for outcome in run.outcomes.values()), words
    for rank, value in enumerate(values(world.run_cell("dist.barrier(); globals().get('before')"))):
        assert value == (None if rank in run.lost else "tensor([0, 1, 2, 3, 4])")
    kept = [rank.process.pid for rank in world.ranks if rank.number not in run.lost]
    assert {*kept} <= {*processes}


LOSES = {"message-size": {1}, "killed": {1}}
"""Programs that end a process."""


@pytest.mark.parametrize(
    "name",
    [
        "wrong-tag",
        "collective-in-finally",
        "stopped",
        pytest.param("partial-group", marks=pytest.mark.stress),
    ],
)
def test_a_program_that_hangs_is_named_and_ended(world: PlayWorld, name: str) -> None:
    check_program(world, name)


@pytest.mark.stress
@pytest.mark.parametrize("session", range(20))
def test_all_programs_are_named_and_ended_in_one_session(
    session: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [*PROGRAMS]
    random.Random(session).shuffle(names)
    world = PlayWorld(SIZE)
    try:
        for name in names:
            check_program(world, name)
    finally:
        world.close()


@dataclass(frozen=True)
class Holdings:
    """What a process holds: threads, open files and sockets, resident bytes."""

    threads: int
    files: int
    sockets: int
    memory: int

    @classmethod
    def of(cls, process: int) -> Holdings:
        place = Path(f"/proc/{process}")
        files = [*links(place / "fd")]
        return cls(
            threads=len([*(place / "task").iterdir()]),
            files=len(files),
            sockets=sum(each.startswith("socket:") for each in files),
            memory=int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        )


@pytest.mark.stress
def test_random_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200, 40 hang, 20 raise, and 10 kill a rank: the session holds at the end what it held when
    a fifth of them had run. No cell kills rank 0, which sees all of them."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    kinds = ["hang"] * 40 + ["raise"] * 20 + ["kill"] * 10 + ["right"] * 130
    draw.shuffle(kinds)
    world = PlayWorld(SIZE, "gloo")
    shared = {*Path("/dev/shm").iterdir()}
    counts: list[list[Holdings]] = []
    try:
        for number, kind in enumerate(kinds, 1):
            rank = draw.randrange(kind == "kill", SIZE)
            source = {
                "hang": f"if rank != {rank}: dist.all_reduce(torch.ones(3))",
                "raise": f"if rank == {rank}: 1 / 0",
                "kill": f"import os\nif rank == {rank}: os._exit(1)\ndist.barrier()",
                "right": "t = torch.ones(1); dist.all_reduce(t); t.item()",
            }[kind]
            run = world.run_cell(source, number)
            assert bool(run.hang) == (kind == "hang"), (number, kind, told(run))
            assert bool(run.lost) == (kind == "kill"), (number, kind, told(run))
            assert kind != "right" or values(run) == ["3.0"] * SIZE
            if number in (40, 200):
                time.sleep(2.5)  # the store's old thread looks once a second
                processes = os.getpid(), *(rank.process.pid for rank in world.ranks)
                counts.append([Holdings.of(process) for process in processes])
        segments = {*Path("/dev/shm").iterdir()}
    finally:
        world.close()
    # a rank that was let go may hold what belongs to one group that is gone, until the next one is
    for before, after in zip(*counts, strict=True):
        assert after.threads <= before.threads + 5
        assert after.files <= before.files + 20
        assert after.sockets <= before.sockets + 5
        assert after.memory <= before.memory + 20e6
    assert counts[1][0].files <= counts[0][0].files + 2
    assert len(segments - shared) <= SIZE
    assert {*Path("/dev/shm").iterdir()} <= shared
    assert [*tmp_path.iterdir()] == []
