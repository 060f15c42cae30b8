"""The agent of rpc: what arrives, what comes back, what fails, and backward across ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from boards import source_of
from fixtures import Run, Worlds

from playground.lessons.rpc import lesson
from playground.lessons.rpc.lesson import Agent, Reference, RemoteForward
from playground.world import RankFailed


def identify(*args: Any) -> tuple[int, tuple[Any, ...]]:
    return dist.get_rank(), args


def double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def call_everybody(rank: int, size: int, numel: int) -> tuple[list[Any], bool, int]:
    """Twice. Returns the answers, whether tensors came back right, and the number of threads that
    are left."""
    before = {*threading.enumerate()}
    for _ in range(2):
        agent: Any = Agent(rank, size)
        found = [agent.call(other, identify, rank, "word", None) for other in agent.others]
        matched = all(
            torch.equal(
                agent.call(other, double, torch.full((numel,), number)),
                torch.full((numel,), 2 * number),
            )
            for number in range(10)
            for other in agent.others
        )
        agent.shut_down()
    return found, matched, len({*threading.enumerate()} - before)


@pytest.mark.parametrize(("size", "numel"), [(2, 100_000), (3, 1), (4, 0)])
def test_everybody_calls_everybody(size: int, numel: int, world: Worlds) -> None:
    for rank, (found, matched, left) in enumerate(world(size).run(call_everybody, numel)):
        assert found == [(other, (rank, "word", None)) for other in range(size) if other != rank]
        assert (matched, left) == (True, 0)


def fail(words: str) -> None:
    raise LookupError(words)


def answer_late(rank: int) -> int:
    time.sleep(0.2 * rank)
    return rank


def call_while_the_others_are_busy(rank: int, size: int) -> list[Any]:
    """Rank 0 calls while the programs of the other ranks wait in shut_down, which they entered."""
    agent: Any = Agent(rank, size)
    found = [agent.call(other, answer_late, other) for other in agent.others] if rank == 0 else []
    agent.shut_down()
    return found


def test_a_rank_that_makes_no_calls_answers(world: Worlds) -> None:
    assert world(3).run(call_while_the_others_are_busy) == [[1, 2], [], []]


def describe_failures(rank: int, size: int) -> list[str]:
    """What a call that fails raises; and then the rank can still be called."""
    agent: Any = Agent(rank, size)
    with pytest.raises(LookupError) as caught:
        agent.call(1 - rank, fail, "not here")
    found = [str(caught.value), *map(str, agent.call(1 - rank, identify))]
    agent.shut_down()
    return found


def test_what_the_function_raises_is_raised_by_the_caller(world: Worlds) -> None:
    assert world(2).run(describe_failures) == [["not here", "1", "()"], ["not here", "0", "()"]]


def change_there(rank: int, size: int) -> tuple[list[int], list[int], list[list[int]]]:
    """Two lists on the other rank: both, and what of them is here."""
    lesson.objects.clear()
    agent: Any = Agent(rank, size)
    first, second = (Reference(agent, 1 - rank, list, [rank, number]) for number in range(2))
    first.call("append", 7)
    found = first.call("copy"), second.call("copy")
    agent.shut_down()
    return *found, [*lesson.objects.values()]


def test_an_object_stays_with_its_owner(world: Worlds) -> None:
    one, other = world(2).run(change_there)
    assert one == ([0, 0, 7], [0, 1], [[1, 0, 7], [1, 1]])
    assert other == ([1, 0, 7], [1, 1], [[0, 0, 7], [0, 1]])


class Layer(torch.nn.Linear):
    """As the lesson's, with a generator of its own: an agent's threads, which make layers at the
    same time, share that of torch."""

    def __init__(self, seed: int) -> None:
        super().__init__(4, 4, bias=False)
        with torch.no_grad():
            self.weight.normal_(generator=torch.Generator().manual_seed(seed))

    get_gradient = lesson.Layer.get_gradient


def backward_over_ranks(rank: int, size: int) -> list[float]:
    """The largest differences of gradients from one process: through a layer on each other rank in
    turn, used twice."""
    torch.set_default_dtype(torch.float64)
    agent: Any = Agent(rank, size)
    layers = {other: Reference(agent, other, Layer, other) for other in agent.others}
    here: Any = {other: Layer(other) for other in agent.others}
    torch.manual_seed(5)
    start = torch.randn(3, 4)
    inputs, same = start.clone().requires_grad_(), start.clone().requires_grad_()
    outputs, expected = inputs, same
    for _ in range(2):
        for other in agent.others:
            outputs = RemoteForward.apply(layers[other], outputs).tanh()
            expected = here[other](expected).tanh()
    outputs.square().sum().backward()
    expected.square().sum().backward()
    pairs: Any = [(inputs.grad, same.grad), (outputs, expected)]
    pairs += [(layers[r].call("get_gradient"), here[r].weight.grad) for r in agent.others]
    agent.shut_down()
    torch.set_default_dtype(torch.float32)
    return [(one - other).abs().max().item() for one, other in pairs]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_backward_crosses_every_rank(size: int, world: Worlds) -> None:
    """All ranks at the same time: each owns a layer for each caller."""
    for differences in world(size).run(backward_over_ranks):
        assert len(differences) == size + 1
        assert max(differences) <= 1e-12


def end_or_wait(end: bool) -> None:
    if end:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def kill_in_a_call(rank: int, size: int, culprit: int) -> None:
    """Rank 0, the culprit, is killed while it answers the other's call; or rank 1 while rank 0
    answers its own."""
    agent: Any = Agent(rank, size)
    if rank == 1:
        if culprit == rank:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        agent.call(0, end_or_wait, culprit == 0)
    agent.shut_down()


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_killed_rank_is_named(culprit: int, world: Worlds) -> None:
    with pytest.raises(RankFailed, match=rf"^rank {culprit} of 2 was killed by SIGKILL"):
        world(2).run(kill_in_a_call, culprit)


def test_a_single_rank_is_refused_in_one_line(run_cli: Run) -> None:
    ran = run_cli("rpc", "-n", 1)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "a call needs at least 2 ranks" in ran.err


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ('rpc.rpc_async(name, add_ten_times_rank, args=("x",))', 0),
        ('torch.futures.wait_all([rpc.rpc_async(name, add_ten_times_rank, args=("x",))])', 1),
    ],
)
def test_an_exception_is_raised_only_where_somebody_waits(
    call: str, code: int, run_cli: Run, tmp_path: Path
) -> None:
    """The rank that ran the function prints it in any case."""
    text = source_of("rpc")
    assert text.count("    rpc.shutdown()\n") == 1
    file = tmp_path / "lesson.py"
    file.write_text(
        text.replace("    rpc.shutdown()\n", f"    {call}\n    rpc.shutdown()\n"), "utf-8"
    )
    ran = run_cli("run", "-n", 2, file)
    assert ran.code == code
    assert ("failed: TypeError" in ran.err) == bool(code)
    assert "On WorkerInfo(" in ran.err
