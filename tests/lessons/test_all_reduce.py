"""The lesson `allreduce`: what its functions leave and send is what its tables and formulas say,
and what our algorithms send; what the chapter computes is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import log2
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Run, Worlds
from test_lessons import docstring_table
from test_readme import fenced_blocks

from playground.algorithms import ALGORITHMS, load_all_reduce
from playground.algorithms.all_reduce import BETWEEN, INSIDE
from playground.algorithms.cost_model import Machine, Task, recursive_doubling_cost, ring_cost
from playground.algorithms.traffic import sent_by
from playground.explain.replay.record.reading import read_recording
from playground.explain.replay.record.recording import PHASE
from playground.lessons.all_reduce import lesson
from playground.site.texts import CHAPTERS
from playground.tap import MESSAGES, Call, Observer, observing

CHAPTER = CHAPTERS["allreduce"]
OURS = {
    "reduce_broadcast": "reduce-broadcast", "everyone_adds": "all-to-all",
    "tutorial_ring": "tutorial-ring", "ring": "ring",
}  # fmt: skip
"""By function of the lesson, the name of our algorithm that does the same."""
PHASES = ("ring_reduce_scatter", "ring_all_gather")


def leave_and_send(rank: int, size: int) -> dict[str, dict[str, object]]:
    """What the ring and its phases leave in what their tables say that the rank has before, and how
    many bytes the rank sends in them."""
    found = {}
    for name in ("ring", *PHASES):
        before = docstring_table("allreduce", name)[rank]["before"]
        tensor = torch.tensor(before, dtype=torch.float64)
        _, nbytes = lesson.measure(getattr(lesson, name), tensor)
        found[name] = {"before": before, "after": tensor.tolist(), "sent": nbytes}
    return found


def test_functions_leave_and_send_what_their_tables_say(world: Worlds) -> None:
    by_rank = world(4).run(leave_and_send)
    for name in by_rank[0]:
        assert docstring_table("allreduce", name) == [found[name] for found in by_rank], name


def compare_with_the_library(rank: int, size: int) -> list[str]:
    """The all-reduces that leave something else than `dist.all_reduce` does; with fewer elements
    than ranks, as many, and a number that is no multiple of theirs."""
    wrong = []
    for numel in (1, 2, size, 3 * size + 2):
        start = torch.arange(numel) + 10**rank
        expected = start.clone()
        dist.all_reduce(expected)
        for name in OURS:
            getattr(lesson, name)(tensor := start.clone())
            wrong += [f"{name}, {numel} elements"] * (not torch.equal(tensor, expected))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 4, pytest.param(5, marks=pytest.mark.stress)])
def test_every_all_reduce_leaves_what_the_library_s_does(size: int, world: Worlds) -> None:
    assert world(size).run(compare_with_the_library) == [[]] * size


class Sends(Observer):
    """Notes the messages that this rank sends: to whom, and how many bytes."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    def begun(self, call: Call) -> None:
        if call.method in MESSAGES and call.peer is not None and (nbytes := sent_by(call)):
            self.found.append((call.peer, nbytes))


def run_both(rank: int, size: int) -> list[list[tuple[list[tuple[int, float]], torch.Tensor]]]:
    """For each all-reduce, the lesson's and our algorithm: what the rank sends, and
    what it then has."""
    torch.manual_seed(rank)
    start, found = torch.rand(3 * size + 2), []
    for name, ours in OURS.items():
        both: list[Callable[..., Any]] = [getattr(lesson, name), load_all_reduce(ours)]
        pair = []
        for function in both:
            tensor, sends = start.clone(), Sends()
            with observing(sends):
                function(tensor)
            pair.append((sorted(sends.found), tensor))
        found.append(pair)
    return found


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.stress)])
def test_our_algorithms_send_the_same_as_the_lesson_s_and_leave_the_same_bits(
    size: int, world: Worlds
) -> None:
    assert {*OURS.values()} < {*ALGORITHMS}
    for rank, found in enumerate(world(size).run(run_both)):
        for name, ((sends, tensor), (ours, other)) in zip(OURS, found, strict=True):
            assert sends == ours, (name, rank)
            assert sends, (name, rank)
            assert torch.equal(tensor, other), (name, rank)


def rows_of(printed: str) -> dict[str, list[str]]:
    """The rows of the table that the program prints, by function."""
    rows = (line.split() for line in printed.splitlines() if not line.startswith(("Rank", " ")))
    return {name: cells for name, *cells in rows}


@pytest.mark.parametrize("size", [2, 3, pytest.param(8, marks=pytest.mark.stress)])
def test_steps_and_bytes_are_counted_as_by_the_formulas(size: int, run_cli: Run) -> None:
    ran = run_cli("allreduce", "-n", size, "--elements", 240)
    assert (ran.code, ran.err) == (0, "")
    rows, nbytes = rows_of(ran.out), 240 * 8
    assert [*rows] == [*OURS, "all_reduce"]
    assert rows.pop("all_reduce")[:-1] == ["-"] * 6
    for name, cells in rows.items():
        assert cells[0:6:2] == cells[1:6:2], name
        assert float(cells[-1]) < 1e-14, name
    counted = ([int(cell) for cell in cells[0:6:2]] for cells in rows.values())
    root, everyone, tutorial, ring = counted
    whole = (size - 1) * nbytes
    assert root == [2 * (size - 1), whole, 2 * whole]
    assert everyone == tutorial == [size - 1, whole, size * whole]
    assert ring == [2 * (size - 1), 2 * whole // size, 2 * whole]


def test_the_page_on_hosts_records_an_all_reduce_in_two_levels(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (CHAPTER.parent / "hosts_and_memory.md").read_text(encoding="utf-8")
    program, recording = tmp_path / "levels.py", tmp_path / "levels.playground"
    [text] = [
        block
        for block in fenced_blocks(page, "python")
        if 'dist.init_process_group("gloo")' in block
    ]
    program.write_text(text, encoding="utf-8")
    monkeypatch.setenv("PLAYGROUND_HOSTS", "2")
    ran = run_cli("run", "-n", 4, "--see", recording, program)
    assert ran.code == 0, ran.err
    assert ran.out.count("[1111.0, 1111.0, 1111.0, 1111.0]") == 4
    phases = {event.name for event in read_recording(recording).events(PHASE)}
    assert {name.partition(" ")[2] for name in phases} == {INSIDE, BETWEEN}


@pytest.mark.gpu
def test_it_runs_on_gpus(run_cli: Run, pair: int) -> None:
    ran = run_cli("allreduce", "--backend", "nccl", "-n", pair)
    assert ran.code == 0, ran.err
    for name, cells in rows_of(ran.out).items():
        assert cells[0:6:2] == cells[1:6:2], name
        assert float(cells[-1]) < 1e-12, name


def test_one_rank_sends_nothing(run_cli: Run) -> None:
    ran = run_cli("allreduce", "-n", 1)
    assert (ran.code, ran.err) == (0, "")
    rows = rows_of(ran.out)
    assert rows.pop("all_reduce") == [*"------", "0e+00"]  # not counted
    assert rows == {name: [*"000000", "0e+00"] for name in OURS}  # counted


def text_blocks() -> list[str]:
    """The diagrams in text that the chapter shows."""
    text = CHAPTER.read_text(encoding="utf-8")
    return re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def read_reduce_scatter(rank: int, size: int) -> list[str]:
    """What this rank sends and adds in each step of the first phase, chunks of one element, in
    words."""
    tensor, steps = torch.full((size,), 10**rank), list[str]()
    real = lesson.exchange

    def exchange(outgoing: torch.Tensor, dst: int, incoming: torch.Tensor, src: int) -> None:
        sent = f"chunk {outgoing.storage_offset()} (= {outgoing.item()}) to rank {dst}"
        real(outgoing, dst, incoming, src)  # type: ignore[no-untyped-call]
        number = (rank - len(steps) - 2) % size
        own, arrived = tensor[number].item(), incoming.item()
        added = f"chunk {number}: {own} + {arrived} = {own + arrived}"
        steps.append(f"r={rank}   {sent}".ljust(38) + added)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson, "exchange", exchange)
        lesson.ring_reduce_scatter(tensor)
    assert [*map(int, re.findall(r"= (\d+)$", steps[-1]))] == [tensor[rank].item()]
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
    machine, lines = Machine(alpha=1e-5, beta=1 / 50e9), []
    for mib in (1 / 16, 4, 16):
        task, label = Task(8, int(mib * 2**20)), f"{mib:.0f} MiB" if mib >= 1 else "64 KiB"
        for name, cost in (("ring", ring_cost), ("doubling", recursive_doubling_cost)):
            us = 1e6 * machine.seconds(cost(task))
            bar = "█" * round(us / 40)
            lines.append(f"{label:>8}  {name:8} {us:5.0f} µs  {bar}")
            label = ""
    assert [block.splitlines()[1:] for block in text_blocks() if block[:1] == "8"] == [lines]


def test_from_the_chapter_s_size_on_the_ring_is_faster_than_doubling() -> None:
    """The inequality, and its value on the links of p2p."""
    text = " ".join(CHAPTER.read_text(encoding="utf-8").split())
    n = 8
    factor = (2 * (n - 1) - log2(n)) / (log2(n) - 2 * (n - 1) / n)
    assert f"For {n} ranks, this is {factor:.1f} · \N{GREEK SMALL LETTER ALPHA} · B" in text
    links = ((1e-5, 450e9), (1e-5, 50e9), (5e-5, 1.25e9))
    sizes = [factor * alpha * bandwidth for alpha, bandwidth in links]
    nvlink, infiniband, ethernet = sizes
    assert f"| 450 GB/s | 10 µs | {nvlink / 1e6:.0f} MB |" in text
    assert f"| 50 GB/s | 10 µs | {infiniband / 1e6:.1f} MB |" in text
    assert f"| 1.25 GB/s | 50 µs | {ethernet / 1e3:.0f} kB |" in text
    for (alpha, bandwidth), size in zip(links, sizes, strict=True):
        machine, task = Machine(alpha=alpha, beta=1 / bandwidth), Task(n, round(size))
        ring = machine.seconds(ring_cost(task))
        assert ring == pytest.approx(machine.seconds(recursive_doubling_cost(task)), rel=1e-3)


def test_the_answer_to_the_chapter_s_problem() -> None:
    """124 million parameters on 64 ranks over InfiniBand."""
    text = " ".join(CHAPTER.read_text(encoding="utf-8").split())
    alpha, bandwidth, nbytes, n = 1e-5, 50e9, 124e6 * 4, 64
    step, chunk = alpha + nbytes / bandwidth, alpha + nbytes / n / bandwidth
    assert f"takes {2 * (n - 1)} steps of {step * 1e3:.2f} ms: {2 * (n - 1) * step:.2f} s" in text
    assert f"takes {n - 1} of these steps: {(n - 1) * step:.2f} s" in text
    assert f"10 µs + {(chunk - alpha) * 1e6:.0f} µs: {2 * (n - 1) * chunk * 1e3:.1f} ms" in text
    half = nbytes / (alpha * bandwidth)
    steps = 2 * (half - 1)
    assert f"= {half:.0f} ranks" in text
    assert f"takes {steps:,.0f} steps of 20 µs: {steps * 2 * alpha * 1e3:.1f} ms" in text
