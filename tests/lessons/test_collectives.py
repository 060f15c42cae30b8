"""collectives: what each call leaves on every rank is what its table says, in a world of any size;
what the chapter's tables say of waiting and of costs is what ranks do."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from math import ceil, log2
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fixtures import Run, Worlds
from test_lessons import docstring_table

import playground
from playground.algorithms.bytes_sent import bytes_sent
from playground.algorithms.cost_model import Machine, Task, ring_cost
from playground.lessons.collectives import lesson as collectives

CHAPTER = Path(playground.__file__).parent / "lessons" / "collectives" / "README.md"
SIZE = 4
CALLS: dict[str, Callable[[int, torch.Tensor], object]] = {
    "barrier": lambda rank, tensor: dist.barrier(),
    "all_reduce": lambda rank, tensor: dist.all_reduce(tensor),
    "all_gather": lambda rank, tensor: dist.all_gather(received(tensor), tensor),
    "reduce_scatter": lambda rank, tensor: dist.reduce_scatter(tensor.clone(), received(tensor)),
    "all_to_all": lambda rank, tensor: dist.all_to_all(received(tensor), received(tensor)),
    "broadcast": lambda rank, tensor: dist.broadcast(tensor, src=0),
    "scatter": lambda rank, tensor: dist.scatter(
        tensor, received(tensor) if rank == 0 else None, src=0
    ),
    "reduce": lambda rank, tensor: dist.reduce(tensor, dst=0),
    "gather": lambda rank, tensor: dist.gather(
        tensor, received(tensor) if rank == 0 else None, dst=0
    ),
}


FUNCTIONS = [
    collectives.broadcast, collectives.reduce, collectives.all_reduce, collectives.scatter,
    collectives.gather, collectives.all_gather, collectives.reduce_scatter, collectives.all_to_all,
    collectives.all_gather_into_tensor, collectives.reduce_scatter_tensor,
    collectives.all_to_all_single, collectives.groups, collectives.asynchronous,
    collectives.operations, collectives.bitwise, collectives.broadcast_object,
    collectives.all_gather_object,
]  # fmt: skip


SAME_TABLE = {"reduce_scatter_tensor": "reduce_scatter"}
"""Functions that name another one's table."""


def leave_numbers(rank: int, size: int) -> dict[str, list[float]]:
    """What each function of the program returns."""
    return {function.__name__: function(rank, size) for function in FUNCTIONS}  # type: ignore[no-untyped-call]


def test_collectives_leave_what_their_tables_say(world: Worlds) -> None:
    by_rank = world(SIZE).run(leave_numbers)
    for name in by_rank[0]:
        table = docstring_table("collectives", SAME_TABLE.get(name, name))
        assert [row["after"] for row in table] == [left[name] for left in by_rank], name


@pytest.mark.parametrize("size", [2, 3, 5])
def test_collectives_in_any_world(size: int, world: Worlds) -> None:
    left = world(size).run(leave_numbers)
    numbers = [rank + 1.0 for rank in range(size)]
    total = sum(numbers)
    nothing: list[list[float]] = [[]] * (size - 1)
    for name, expected in {
        "broadcast": [[1.0]] * size,
        "reduce": [[total], *nothing],
        "all_reduce": [[total]] * size,
        "scatter": [[number] for number in numbers],
        "gather": [numbers, *nothing],
        "all_gather": [numbers] * size,
        "reduce_scatter": [[total * number] for number in numbers],
        "all_to_all": [[10.0 * sender + rank for sender in range(size)] for rank in range(size)],
        "all_gather_into_tensor": [[half / 2 for half in range(2 * size)]] * size,
        "reduce_scatter_tensor": [[total * number] for number in numbers],
        "all_to_all_single": [
            [10 * sender + rank for sender in range(size) for _ in range(rank)]
            for rank in range(size)
        ],
        "groups": [[2.0]] * 2 + [[1.0]] * (size - 2),
        "asynchronous": [[total, size]] * size,
        "broadcast_object": [[0.1]] * size,
        "all_gather_object": [[*range(size)]] * size,
    }.items():
        assert [each[name] for each in left] == expected, name


def rank_outside(rank: int, size: int) -> tuple[int, float]:
    """The rank in a group of ranks 0 and 1, and the tensor after a call that all ranks make."""
    group, tensor = dist.new_group([0, 1]), torch.ones(1)
    if rank > 1:
        with pytest.warns(UserWarning, match=f"global rank {rank} which does not belong to"):
            dist.all_reduce(tensor, group=group)
    else:
        dist.all_reduce(tensor, group=group)
    return dist.get_rank(group), tensor.item()


def test_a_rank_outside_a_group_is_warned_and_changes_nothing(world: Worlds) -> None:
    assert world(3).run(rank_outside) == [(0, 2.0), (1, 2.0), (-1, 1.0)]


def count_arrivals(rank: int, size: int) -> int:
    """How many ranks had come to the barrier when it let this one through."""
    store = dist.distributed_c10d._get_default_store()
    store.add("arrived", 1)
    dist.barrier()
    return int(store.add("arrived", 0))


def test_a_barrier_lets_no_rank_through_early(world: Worlds) -> None:
    assert world(SIZE).run(count_arrivals) == [SIZE] * SIZE


def miss_a_barrier(rank: int, size: int) -> str:
    """The error of a monitored barrier that ranks 1 and 2 do not call."""
    dist.monitored_barrier(wait_all_ranks=True)  # all come
    store = dist.distributed_c10d._get_default_store()
    if rank in (1, 2):
        store.wait(["named"])
        return ""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
    except RuntimeError as error:
        return str(error)
    finally:
        store.set("named", "")
    return "all came"


def test_a_monitored_barrier_names_all_who_are_missing(world: Worlds) -> None:
    assert "Ranks 1, 2 failed to pass monitoredBarrier" in world(3).run(miss_a_barrier)[0]


def received(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for _ in range(SIZE)]


def read_table() -> dict[str, list[set[int]]]:
    """By operation: who waits for rank 0, for rank 1, …"""
    table = CHAPTER.read_text(encoding="utf-8").partition("rank 3 late |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split("|") for line in table.splitlines() if "`" in line]
    return {
        name: [{*map(int, cell.split())} for cell in cells]
        for names, *cells in rows
        for name in re.findall(r"`(\w+)", names)
    }


def wait_for_each(rank: int, size: int, name: str, waiting: list[set[int]]) -> list[bool]:
    """Be late, one rank after the other: until those have returned who do not wait. Returns, for
    this rank's turn, whether one of those that wait has returned, too."""
    store, early = dist.distributed_c10d._get_default_store(), []
    for late in range(size):
        returned = [f"{name}, {late} late: {other}" for other in range(size)]
        if rank == late:
            free = {*range(size)} - {late} - waiting[late]
            store.wait([returned[other] for other in free])
            early += [store.check([returned[other]]) for other in waiting[late]]
        CALLS[name](rank, torch.ones(1))
        store.set(returned[rank], "")
        dist.barrier()
    return early


def test_the_table_names_all_of_them() -> None:
    assert read_table().keys() == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_who_waits_for_whom(name: str, world: Worlds) -> None:
    waiting = read_table()[name]
    assert any(waiting)
    assert not any(map(any, world(SIZE).run(wait_for_each, name, waiting)))


def test_the_report_is_that_of_a_rank_that_leaves_a_call_out(run_cli: Run, tmp_path: Path) -> None:
    """With its line numbers, in the file that the chapter says how to edit."""
    shown = re.search(
        r"^playground: deadlock: .*?(?=^```)", CHAPTER.read_text("utf-8"), re.M | re.S
    )
    assert shown
    edited, count = re.subn(
        r"^    (dist\.all_reduce\(tensor, op=dist\.ReduceOp\.SUM\))",
        r"    if rank != 2:\n        \1",
        Path(str(collectives.__file__)).read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    assert count == 1
    file = tmp_path / "lesson.py"
    file.write_text(edited, encoding="utf-8")
    ran = run_cli("run", "-n", SIZE, file)
    assert ran.code == 1, ran.err
    told, expected = (
        re.sub(r"\d+\.\d s", "0.5 s", " ".join(each.split())) for each in (ran.err, shown[0])
    )
    assert told == expected


SIGNS = {
    "\N{MINUS SIGN}": "-", "·": "*", "⌈log₂ N⌉": "ceil(log2(N))",
    "\N{GREEK SMALL LETTER ALPHA}": "alpha", "`": "",
}  # fmt: skip
"""What the chapter writes, and Python."""


def read_costs() -> list[dict[str, str]]:
    """The chapter's table of costs, a dictionary per row, as Python writes the formulas."""
    text = CHAPTER.read_text(encoding="utf-8")
    table = text[text.index("| call | S | by |") :].partition("\n\n")[0]
    for sign, python in SIGNS.items():
        table = table.replace(sign, python)
    table = re.sub(r"\b(\d)\(", r"\1*(", table)
    heading, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    ]
    return [dict(zip(heading, row, strict=True)) for row in rows]


def value(formula: str, **names: float) -> float:
    return float(eval(formula, {"ceil": ceil, "log2": log2}, names))


COSTS = {f"{row['call']}, {row['by']}": row for row in read_costs()}
ALPHA, BANDWIDTH = 5e-5, 1.25e9


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", COSTS)
def test_the_bytes_and_steps_of_the_table(name: str, size: int) -> None:
    """The machine's formulas give the bytes; messages that are passed on step by step, the steps,
    the bytes on the busiest link, and with them the time."""
    row, nbytes = COSTS[name], 840 * size
    at_root, _, elsewhere = row["a rank sends"].partition(";")
    steps, on_path = {
        "ring": ring_steps, "tree": tree_steps, "each to each": direct_steps,
        "each to the root": direct_steps, "the root to each": direct_steps,
    }[row["by"]](row["call"], size, nbytes)  # fmt: skip
    names = {"N": size, "S": nbytes, "alpha": ALPHA, "B": BANDWIDTH}
    assert value(row["steps"], **names) == steps
    assert value(row["time"], **names) == pytest.approx(steps * ALPHA + on_path / BANDWIDTH)
    if row["by"] != "tree":
        place = 1 if row["call"] == "gather" else 0
        sent = value(at_root.removeprefix("the root: "), **names)
        assert sent == pytest.approx(bytes_sent(row["call"], size, nbytes, place))
        if elsewhere:
            assert elsewhere == " the root: 0"
            assert bytes_sent(row["call"], size, nbytes, 0) == 0
    else:
        assert value(at_root.removeprefix("the root: "), **names) == on_path
    if row["call"] == "all_reduce":
        machine = Machine(alpha=ALPHA, beta=1 / BANDWIDTH)
        by_model = machine.seconds(ring_cost(Task(size, nbytes)))
        assert value(row["time"], **names) == pytest.approx(by_model)


def ring_steps(call: str, size: int, nbytes: int) -> tuple[int, float]:
    """Every rank passes a chunk to the right until all have what they should: the ranks' own
    shares of the sum, all chunks, or first one and then the other."""
    steps = 0
    if call in ("reduce_scatter", "all_reduce"):
        summed = [{chunk: {rank} for chunk in range(size)} for rank in range(size)]
        while not all(any(len(ranks) == size for ranks in each.values()) for each in summed):
            sent = [summed[rank][(rank - steps) % size] for rank in range(size)]
            for rank in range(size):
                summed[rank][(rank - 1 - steps) % size] |= sent[rank - 1]
            steps += 1
    if call in ("all_gather", "all_reduce"):
        had, passed = [{rank} for rank in range(size)], [*range(size)]
        while not all(len(each) == size for each in had):
            passed = [passed[rank - 1] for rank in range(size)]
            for rank in range(size):
                had[rank].add(passed[rank])
            steps += 1
    return steps, steps * nbytes / size


def tree_steps(call: str, size: int, nbytes: int) -> tuple[int, float]:
    """In each step all who have the tensor send it to one more."""
    have, steps = 1, 0
    while have < size:
        have, steps = min(size, 2 * have), steps + 1
    return steps, steps * nbytes


def direct_steps(call: str, size: int, nbytes: int) -> tuple[int, float]:
    """A rank, or the root, has a message for each other rank: one per step."""
    message = nbytes if call == "gather" else nbytes / size
    return len(range(1, size)), len(range(1, size)) * message


def test_the_table_has_every_collective_that_moves_data() -> None:
    assert {row["call"] for row in read_costs()} == {
        "all_reduce", "reduce_scatter", "all_gather", "all_to_all",
        "broadcast", "gather", "scatter",
    }  # fmt: skip


def test_the_answer_to_the_problem() -> None:
    """ResNet-50's gradients on eight ranks over 10 Gbit/s."""
    text = " ".join(CHAPTER.read_text(encoding="utf-8").split())
    formula = COSTS["all_reduce, ring"]["time"]
    once = value(formula, N=8, S=25.6e6 * 4, alpha=ALPHA, B=BANDWIDTH)
    each = once + 160 * 14 * ALPHA
    assert f"{14 * ALPHA * 1e3:.1f} ms" in text
    assert f"10.24 ms: {once * 1e3:.0f} ms" in text
    assert f"= {each * 1e3:.0f} ms" in text
