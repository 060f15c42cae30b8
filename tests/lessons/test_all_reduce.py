"""The lesson `allreduce` and training on our algorithms."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.distributed as dist
from fixtures import Run, Worlds
from widths import too_wide

from playground.algorithms import ALGORITHMS
from playground.algorithms.cost_model import Machine, Task, recursive_doubling_cost, ring_cost
from playground.lessons import LESSONS
from playground.lessons.all_reduce import lesson
from playground.lessons.all_reduce.page import (
    STORY,
    TRACEABLE,
    Note,
    load_of,
    steps_of,
    summary_of,
)
from playground.runtime import PlaygroundError
from playground.runtime.remote import ROOT
from playground.training.results import replicas_verdict

LESSON = LESSONS["allreduce"]
TRACE = LESSON.remote("run", "trace")


def test_the_lesson_has_every_algorithm() -> None:
    names = [name for name, spec in ALGORITHMS.items() if spec.has_messages]
    assert list(TRACEABLE) == names
    assert all(summary_of(name) for name in TRACEABLE)


WAYS = (lesson.reduce_broadcast, lesson.all_to_all, lesson.tutorial_ring, lesson.ring)


def compare_with_the_backend(rank: int, size: int) -> list[str]:
    """The ways of the board, and the tutorial's function, that leave something else than
    `dist.all_reduce` does; with fewer elements than ranks, as many, and a number that is no
    multiple of theirs."""
    wrong = []
    for numel in (1, 2, size, 3 * size + 2):
        mine = torch.arange(numel) + 10**rank
        expected = mine.clone()
        dist.all_reduce(expected)
        received = torch.zeros(numel, 2, dtype=torch.int64).t()  # not contiguous
        lesson.allreduce(mine.repeat(2, 1), received)
        wrong += ["allreduce"] * (received.tolist() != [expected.tolist()] * 2)
        for way in WAYS:
            way(tensor := mine.clone(), rank, size)
            wrong += [f"{way.__name__}, {numel} elements"] * (not torch.equal(tensor, expected))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_way_of_the_board_leaves_what_the_backend_does(size: int, world: Worlds) -> None:
    assert world(size).run(compare_with_the_backend) == [[]] * size


def run_phases(rank: int, size: int) -> tuple[list[int], list[int]]:
    """A chunk on each rank after the first phase, and all of them after the second."""
    tensor = torch.full((2 * size,), 10**rank)
    lesson.reduce_scatter(tensor, rank, size)
    mine = tensor.tensor_split(size)[rank].tolist()
    lesson.all_gather(tensor, rank, size)
    return mine, tensor.tolist()


def test_after_the_first_phase_of_the_ring_each_rank_has_its_chunk(world: Worlds) -> None:
    assert world(3).run(run_phases) == [([111] * 2, [111] * 6)] * 3


def find_largest(rank: int, size: int) -> list[float]:
    tensor = torch.tensor([rank + 1.0, -rank])
    lesson.ring(tensor, rank, size, add=lambda mine, theirs: torch.maximum(mine, theirs, out=mine))
    return list(tensor.tolist())


def test_a_way_adds_as_it_is_told(world: Worlds) -> None:
    assert world(3).run(find_largest) == [[3.0, 0.0]] * 3


def tutorials_call(rank: int, size: int) -> list[float]:
    send, recv = torch.full((2, 3), rank + 1.0), torch.zeros(2, 3)
    lesson.allreduce(send, recv)
    assert torch.equal(send, torch.full((2, 3), rank + 1.0))
    return list(recv.flatten().tolist())


def test_the_tutorials_function_by_its_signature(world: Worlds) -> None:
    assert world(4).run(tutorials_call) == [[10.0] * 6] * 4


@pytest.mark.parametrize(("size", "name"), [(5, "ring"), (3, "pipelined-ring")])
def test_every_message_recorded_is_one_that_made_the_difference(
    size: int, name: str, world: Worlds
) -> None:
    """Replay the notes: what a rank holds after a step comes from what it held and what was sent to
    it."""
    by_rank = world(size).run(TRACE, [name], 2 * size)
    ranks = [traces[0] for traces in by_rank]
    steps = steps_of(ranks)
    assert len(steps) == 2 * (size - 1)
    for number, step in enumerate(steps):
        for rank in range(size):
            note: Note = ranks[rank].notes[step[rank]]
            [sent] = ranks[(rank - 1) % size].notes[step[(rank - 1) % size]].sends
            first, stop = sent["where"]
            expected = list(note.holds)
            held = expected[first:stop] if number < size - 1 else [0] * (stop - first)
            expected[first:stop] = [
                mine + theirs for mine, theirs in zip(held, sent["values"], strict=True)
            ]
            last = step[rank] + 1 == len(ranks[rank].notes)
            assert expected == (
                ranks[rank].after if last else ranks[rank].notes[step[rank] + 1].holds
            )


def test_the_root_of_reduce_broadcast_carries_everything(world: Worlds) -> None:
    star, ring = map(
        load_of, zip(*world(5).run(TRACE, ["reduce-broadcast", "ring"], 10), strict=True)
    )
    assert star.busiest == 2 * 4 * 80
    assert ring.busiest == 2 * (2 * 4 * 80 // 5)
    assert star.in_all == ring.in_all == 2 * 4 * 80


def stories(text: str) -> list[str]:
    headings = [line.split(":")[0] for line in text.splitlines() if re.match(r"[\w-]+: ", line)]
    return headings[1 : headings.index("cost")]


def test_the_story(run_cli: Run) -> None:
    shown = run_cli("allreduce", "-n", "3")
    assert shown.code == 0
    assert stories(shown.out) == ["ring"]
    assert "  1, reduce-scatter     0  [2:3] = [1] to 1    [1, 101, 1]" in shown.out
    phases = re.findall(r"^  \d, ([\w-]+)", shown.out, re.MULTILINE)
    assert phases == ["reduce-scatter"] * 2 + ["all-gather"] * 2
    table = shown.out.split("\ncost: ")[1]
    assert all(f"  {name} " in table for name, spec in ALGORITHMS.items() if spec.has_messages)
    assert too_wide(shown.out) == []
    assert len(shown.out.splitlines()) < 50
    ending = (
        "3 ranks end with 111; a rank sends at most 32 bytes by ring, and 48 by reduce-broadcast"
    )
    assert " ".join(table.split()).endswith(f"Shown: {ending}.")
    whole = run_cli("allreduce", "-n", "3", "--wide").out
    assert stories(whole) == [*STORY]
    assert re.search(r"^ +1  all = \[10, 10, 10\] to 0 +\[10, 10, 10\]$", whole, re.MULTILINE)


def test_one_algorithm_as_json(run_cli: Run) -> None:
    shown = run_cli("allreduce", "--algorithm", "binary-tree", "-n", 5, "--elements", 3, "--json")
    document = json.loads(shown.out)
    assert [step["name"] for step in document["steps"]] == ["binary-tree"]
    assert [rank["after"] for rank in document["steps"][0]["ranks"]] == [[11111] * 3] * 5
    assert document["cost"]["binary-tree"]["in_all"] == 2 * 4 * 24
    rank = document["steps"][0]["ranks"][1]
    assert rank["notes"][0] == {
        "holds": [10] * 3, "sends": [], "receives": [{"from": 3, "where": None}, {"from": 4,
        "where": None}]
    }  # fmt: skip
    assert rank["notes"][1]["sends"] == [{"to": 0, "values": [11010] * 3, "where": [0, 3]}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "bogus"], "'bogus' is not one of"),
        (["--elements", "65"], "65 is not in the range"),
        (["-n", "1"], "at least 2 ranks"),
        (["-n", "65"], "choose --elements"),
    ],
)
def test_bad_input(words: list[str], message: str, run_cli: Run) -> None:
    shown = run_cli("allreduce", *words)
    assert (shown.code, shown.out) == (2, "")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_replicas_that_differ_are_an_error_unless_it_is_rounding() -> None:
    assert "bit-identical" in replicas_verdict(0.0, "ring")
    assert "differ by up to 1.0e-08" in replicas_verdict(1e-8, "tutorial-ring")
    for difference, all_reduce in (
        (1e-8, "ring"),
        (1e-8, None),
        (0.1, "tutorial-ring"),
        (float("nan"), "backend"),
    ):
        with pytest.raises(PlaygroundError, match="must not"):
            replicas_verdict(difference, all_reduce)


def text_blocks() -> list[str]:
    """The diagrams in text that the chapter shows."""
    text = (ROOT / LESSON.path / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def read_reduce_scatter(rank: int, size: int) -> list[str]:
    """What this rank sends and adds in each step, chunks of one element, in words."""
    tensor, steps = torch.full((size,), 10**rank), []

    def exchange(send: lesson.Messages, receive: lesson.Messages) -> None:
        [(chunk, right)] = send
        sent = f"chunk {chunk.storage_offset()}, {chunk.item()}, to rank {right}"
        steps.append(f"r={rank}   {sent}".ljust(33))
        lesson.exchange(send, receive)

    def add(mine: torch.Tensor, theirs: torch.Tensor) -> None:
        terms = f"chunk {mine.storage_offset()}: {mine.item()} + {theirs.item()}"
        steps[-1] += f"{terms} = {mine.add_(theirs).item()}"

    lesson.reduce_scatter(tensor, rank, size, exchange, add)
    return steps


def test_the_chapter_reads_reduce_scatter_as_it_runs(world: Worlds) -> None:
    by_rank = world(3).run(read_reduce_scatter)
    lines = [
        f"{f'step {step + 1}' if not rank else '':8}{steps[step]}"
        for step in range(2)
        for rank, steps in enumerate(by_rank)
    ]
    assert [block.splitlines()[1:] for block in text_blocks() if block[:1] == "N"] == [lines]


def test_the_chapter_s_times_are_those_of_the_cost_model() -> None:
    machine, lines = Machine(alpha=5e-6, beta=1 / 25e9), []
    for mib in (1 / 16, 1, 4):
        task, label = Task(8, int(mib * 2**20)), f"{mib:.0f} MiB" if mib >= 1 else "64 KiB"
        for name, cost in (("ring", ring_cost), ("doubling", recursive_doubling_cost)):
            us = 1e6 * machine.seconds(cost(task))
            bar = "█" * round(us / 20)
            lines.append(f"{label:>8}  {name:8} {us:5.0f} µs  {bar}")
            label = ""
    assert [block.splitlines()[1:] for block in text_blocks() if block[:1] == "8"] == [lines]
    equal = 8.8 * machine.alpha / machine.beta
    assert equal == pytest.approx(1.1e6)
    task = Task(8, round(equal))
    ring, doubling = (machine.seconds(cost(task)) for cost in (ring_cost, recursive_doubling_cost))
    assert ring == pytest.approx(doubling)
