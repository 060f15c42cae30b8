"""Remote calls: what arrives, what comes back, and what is left afterwards."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds

from playground.lessons.rpc import lesson
from playground.lessons.rpc.agent import Agent, current_agent
from playground.lessons.rpc.lesson import apply_remotely
from playground.runtime import RankFailed, UsageError

kept: list[torch.nn.Module] = []


def double(value: Any) -> Any:
    return value * 2


def identify(*args: Any) -> tuple[int, tuple[Any, ...]]:
    return dist.get_rank(), args


def fail(words: str) -> None:
    raise LookupError(words)


def make_lock() -> Any:
    return threading.Lock()


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def fail_unpicklably() -> None:
    raise Unpicklable("one", "two")


def ask_back(rank: int, depth: int) -> list[int]:
    """The ranks that were called, in turn, one by the other."""
    here = dist.get_rank()
    return [here] if depth == 0 else [here, *current_agent().call(rank, ask_back, here, depth - 1)]


def call_everybody(rank: int, size: int) -> list[Any]:
    """Twice: a world may call again after the end."""
    for _ in range(2):
        with Agent() as agent:
            answers = [agent.call(other, identify, rank, "word", None) for other in range(size)]
            futures = [
                agent.call_async(other, double, torch.full((other + 1,), rank))
                for other in range(size)
            ]
            found = [*answers, *(future.wait().tolist() for future in futures)]
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_everybody_calls_everybody(size: int, world: Worlds) -> None:
    for rank, answers in enumerate(world(size).run(call_everybody)):
        assert answers[:size] == [(other, (rank, "word", None)) for other in range(size)]
        assert answers[size:] == [[2 * rank] * (other + 1) for other in range(size)]


def describe_failures(rank: int, size: int) -> list[tuple[str, str, str]]:
    """(type, words, traceback) of what calls to the next rank raise."""
    found = []
    with Agent() as agent:
        for function, args in ((fail, ("not here",)), (make_lock, ()), (fail_unpicklably, ())):
            try:
                agent.call((rank + 1) % size, function, *args)
            except Exception as error:
                found.append((type(error).__name__, str(error), traceback.format_exc()))
        assert agent.call((rank + 1) % size, double, 4) == 8
    return found


def test_exceptions_come_with_their_traceback(world: Worlds) -> None:
    for failures in world(2).run(describe_failures):
        [missing, no_pickle, wrong_pickle] = failures
        assert missing[:2] == ("LookupError", "not here")
        assert "raise LookupError(words)" in missing[2]
        assert "agent.py" not in missing[2].split("The above exception")[0]
        assert no_pickle[0] == "TypeError"
        assert "cannot pickle '_thread.lock'" in no_pickle[1]
        assert wrong_pickle[:2] == ("RuntimeError", "Unpicklable: one")


def cross_calls(rank: int, size: int, count: int, numel: int) -> bool:
    """Requests with the same numbers cross each other, with tensors that travel by themselves; each
    answer takes a call the other way. The last reply is awaited first."""
    tensors = [torch.full((numel,), number) for number in range(count)]
    with Agent() as agent:
        calls = [agent.call_async(1 - rank, double_there, rank, tensor) for tensor in tensors]
        doubled = [call.wait() for call in reversed(calls)]
    return all(
        torch.equal(ours, 2 * tensor) for ours, tensor in zip(doubled[::-1], tensors, strict=True)
    )


def double_there(rank: int, tensor: torch.Tensor) -> Any:
    return current_agent().call(rank, double, tensor)


@pytest.mark.parametrize(("count", "numel"), [(200, 1), (40, 1000)])
def test_replies_are_awaited_in_any_order(count: int, numel: int, world: Worlds) -> None:
    assert world(2).run(cross_calls, count, numel) == [True, True]


def pass_references_on(rank: int, size: int) -> list[Any]:
    """Rank 0 has rank 1 keep a list, and hands the reference to rank 2. What is left on rank 1
    after each step."""
    left: list[Any] = []
    with Agent() as agent:
        if rank == 0:
            reference = agent.remote(1, list, (1, 2))
            agent.call(2, hold, reference)
            left.append(agent.call(1, counts))
            del reference
            left.append(agent.call(1, counts))
            left.append(agent.call(2, append_to_held, 3))
            agent.call(2, let_go)
            left.append(agent.call(2, ask_for_counts))
        dist.barrier()
    return left


held: list[Any] = []


def hold(reference: Any) -> None:
    held.append(reference)


def append_to_held(value: int) -> list[int]:
    held[0].call("append", value)
    return held[0].to_here()


def let_go() -> None:
    held.clear()


def counts() -> list[int]:
    return [current_agent().counts[number] for number in current_agent().objects]


def ask_for_counts() -> list[int]:
    return current_agent().call(1, counts)


def test_an_object_lives_as_long_as_somebody_refers_to_it(world: Worlds) -> None:
    assert world(3).run(pass_references_on)[0] == [[2], [1], [1, 2, 3], []]


def drop_many(rank: int, size: int) -> int:
    with Agent() as agent:
        references = [agent.remote(1 - rank, list) for _ in range(300)]
        before = len(agent.call(1 - rank, counts))
        del references
        while agent.call(1 - rank, counts):  # another thread may still be telling of the last one
            pass
        return before


def test_many_references_are_dropped_at_once(world: Worlds) -> None:
    assert world(2).run(drop_many) == [300] * 2


def backward_over_ranks(rank: int, size: int) -> list[float]:
    """The largest differences of gradients from those of one process: of the input here, of the
    weight there."""
    torch.manual_seed(1)
    layers = torch.nn.ModuleList([torch.nn.Linear(5, 4) for _ in range(2)]).double()
    inputs = torch.randn(3, 5).double()
    kept[:] = [layers[1]]
    with Agent() as agent:
        dist.barrier()
        differences = []
        if rank == 0:
            ours, alone = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
            hidden = layers[0](ours)
            (
                apply_remotely(agent, 1, through_kept, torch.cat([hidden, hidden[:, :1]], 1)) ** 2
            ).sum().backward()
            there = agent.call(1, gradient_of_kept)
            ours_first = layers[0].weight.grad.clone()
            layers.zero_grad()
            hidden = layers[0](alone)
            (layers[1](torch.cat([hidden, hidden[:, :1]], 1)) ** 2).sum().backward()
            pairs = [
                (ours.grad, alone.grad),
                (there, layers[1].weight.grad),
                (ours_first, layers[0].weight.grad),
            ]
            differences = [(one - other).abs().max().item() for one, other in pairs]
            assert agent.call(1, counts) in ([], [1])
    return differences


def through_kept(inputs: torch.Tensor) -> torch.Tensor:
    return kept[0](inputs)


def gradient_of_kept() -> torch.Tensor:
    return kept[0].weight.grad


def test_backward_goes_on_across_ranks(world: Worlds) -> None:
    [differences, _] = world(2).run(backward_over_ranks)
    assert max(differences) <= 1e-12


FUNCTIONS: list[Callable[..., torch.Tensor]] = [
    torch.mul,
    torch.matmul,
    lambda one, other: one.sin() * other + one,
]


def apply_function(number: int, *inputs: torch.Tensor) -> torch.Tensor:
    return FUNCTIONS[number](*inputs)


def differentiate_twice(rank: int, size: int, new_agent: Any) -> list[bool]:
    """Whether gradients are those of one process: of two inputs, of one in both places, and again
    by a second call."""
    found = []
    with new_agent() as agent:
        for dtype, number, same in itertools.product(
            (torch.float64, torch.complex128), range(3), (True, False)
        ):
            torch.manual_seed(rank)
            one = torch.randn(3, 3, dtype=dtype, requires_grad=True)
            other = one if same else torch.randn(3, 3, dtype=dtype, requires_grad=True)
            there = apply_remotely(agent, 1 - rank, partial(apply_function, number), one, other)
            here = apply_function(number, one, other)
            for output in (there, there):
                ours = torch.autograd.grad(output.abs().sum(), (one, other), retain_graph=True)
                due = torch.autograd.grad(here.abs().sum(), (one, other), retain_graph=True)
                found.append(all(map(torch.allclose, ours, due)))
    return found


@pytest.mark.parametrize("new_agent", [Agent, lesson.Agent])
def test_gradients_are_those_of_one_process(new_agent: Any, world: Worlds) -> None:
    assert world(2).run(differentiate_twice, new_agent) == [[True] * 24] * 2


def end_or_wait(end: bool) -> None:
    if end:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def kill_in_a_call(rank: int, size: int, culprit: int, new_agent: Any) -> None:
    """Rank 0, the culprit, is killed while it answers the other's call; or rank 1 while rank 0
    answers its own."""
    with new_agent() as agent:
        if rank == 1:
            if culprit == rank:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
            agent.call(0, end_or_wait, culprit == 0)


@pytest.mark.parametrize(
    ("culprit", "new_agent"),
    [
        (1, Agent),
        (0, lesson.Agent),
        pytest.param(0, Agent, marks=pytest.mark.stress),
        pytest.param(1, lesson.Agent, marks=pytest.mark.stress),
    ],
)
def test_a_killed_rank_is_named(culprit: int, new_agent: Any, world: Worlds) -> None:
    with pytest.raises(RankFailed, match=rf"^rank {culprit} of 2 was killed by SIGKILL"):
        world(2).run(kill_in_a_call, culprit, new_agent)


def raise_a_remote_error(rank: int, size: int) -> None:
    with Agent() as agent:
        if rank == 1:
            with pytest.raises(UsageError, match="a remote call to rank 2: there are ranks 0 to 1"):
                agent.call(size, double, 1)
            agent.call(0, fail, "there")


def test_a_remote_error_that_nobody_catches_is_shown_with_both_tracebacks(world: Worlds) -> None:
    with pytest.raises(RankFailed) as caught:
        world(2).run(raise_a_remote_error)
    assert str(caught.value).startswith("rank 1 of 2 failed: LookupError")
    assert "raise LookupError(words)" in caught.value.traceback
    assert 'agent.call(0, fail, "there")' in caught.value.traceback


def call_each_other_deeply(rank: int, size: int, depth: int) -> int:
    with Agent() as agent:
        return len(agent.call(1 - rank, ask_back, rank, depth))


def test_calls_within_calls_may_be_many(world: Worlds) -> None:
    """Each waits for the next: there is a thread for every one of them."""
    assert world(2).run(call_each_other_deeply, 100) == [101, 101]


def send_what_cannot_be_sent(rank: int, size: int) -> list[int]:
    """The counts of an object's references on its owner, rank 1, after a message with one of them
    could not be made."""
    with Agent() as agent:
        if rank == 0:
            reference = agent.remote(1, list, [1])
            for to in (1, 2):
                with pytest.raises(TypeError, match="pickle"):
                    agent.call(to, identify, reference, threading.Lock())
            found = agent.call(1, counts)
            del reference
            return [*found, len(agent.call(1, counts))]
    return []


def test_what_cannot_be_sent_counts_no_reference(world: Worlds) -> None:
    assert world(3).run(send_what_cannot_be_sent)[0] == [1, 0]


def without_threads(agent: Agent) -> None:
    def refuse(rank: int) -> None:
        raise RuntimeError("can't start new thread")

    agent.start_thread = refuse  # type: ignore[method-assign]


def ask_one_without_threads(rank: int, size: int) -> list[str]:
    told = []
    with Agent() as agent:
        if rank == 1:
            without_threads(agent)
        agent.barrier()
        if rank == 0:
            for _ in range(3):
                try:
                    told.append(str(agent.call(1, ask_back, 0, 0)))
                except RuntimeError as error:
                    told.append(str(error))
    return told


def test_where_no_thread_can_start_the_caller_gets_an_answer(world: Worlds) -> None:
    told, _ = world(2).run(ask_one_without_threads)
    assert len(told) == 3
    assert {*told} <= {"[1]", "can't start new thread"}
    assert "can't start new thread" in told


def leave() -> None:
    raise SystemExit(3)


class Failing:
    def __reduce__(self) -> Any:
        return fail, ("when unpickled",)


class Total:
    """Is rebuilt from what is computed on its tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.total = tensor, tensor.sum().item()

    def __reduce__(self) -> Any:
        return Total, (self.tensor,)


def append_to(mine: list[int], tensor: torch.Tensor) -> list[int]:
    tensor += 1
    mine.append(2)
    return mine


def call_in_all_ways(rank: int, size: int) -> list[Any]:
    found: list[Any] = []
    with Agent() as agent:
        future = agent.call_async(1 - rank, Failing)
        for wait in (future.wait, future.wait, partial(agent.call, 1 - rank, leave)):
            with pytest.raises((LookupError, RuntimeError)) as caught:
                wait()
            found.append(str(caught.value))
        found.append(agent.call(1 - rank, Total, torch.ones(2000)).total)
        mine, tensor = [1], torch.zeros(2000)
        found += [agent.call(rank, append_to, mine, tensor), mine, tensor.any().item()]
    return found


def test_errors_totals_and_copies_arrive_wherever_the_function_runs(world: Worlds) -> None:
    """An error is raised as often as it is asked for; a tensor is there before what is computed
    from it; a call to the rank itself copies, too."""
    due = ["when unpickled", "when unpickled", "SystemExit: 3", 2000.0, [1, 2], [1], False]
    assert world(2).run(call_in_all_ways) == [due] * 2


def run_out_of_memory(rank: int, size: int) -> list[int]:
    """A result for which there is no memory here, and one for which there is."""
    with Agent() as agent:
        if rank == 1:
            return []
        limits = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, limits[1]))
        try:
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                agent.call(1, torch.zeros, 2**25)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        return agent.call(1, double, torch.ones(2000, dtype=torch.int64)).unique().tolist()


def test_a_result_that_is_too_large_is_an_error(world: Worlds) -> None:
    assert world(2, fresh=True).run(run_out_of_memory) == [[2], []]
