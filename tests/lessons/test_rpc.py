"""The agent on rpc's board: calls from several threads at once, what fails, and what is left
afterwards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds

from playground.lessons.rpc.lesson import Agent, agents, apply_remotely

kept: list[torch.nn.Module] = []


def identify(*args: Any) -> tuple[int, tuple[Any, ...]]:
    return dist.get_rank(), args


def double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def call_everybody(rank: int, size: int, numel: int) -> tuple[list[Any], bool, int]:
    """Twice, each time by eight threads. Returns the answers, whether each thread got its own, and
    how many threads are left."""
    before = {*threading.enumerate()}
    for _ in range(2):
        with Agent() as agent:
            found = [agent.call(other, identify, rank, "word", None) for other in agent.others]
            tensors = [torch.full((numel,), number) for number in range(24)]
            with ThreadPoolExecutor(8) as threads:
                to = [(rank + 1) % size] * len(tensors)
                doubled = list(threads.map(agent.call, to, [double] * len(tensors), tensors))
            matched = all(
                torch.equal(ours, 2 * tensor) for ours, tensor in zip(doubled, tensors, strict=True)
            )
    return found, matched, len({*threading.enumerate()} - before)


@pytest.mark.parametrize(
    ("size", "numel"), [(2, 100_000), pytest.param(3, 1, marks=pytest.mark.stress), (4, 0)]
)
def test_every_thread_gets_the_reply_to_its_call(size: int, numel: int, world: Worlds) -> None:
    for rank, (found, matched, left) in enumerate(world(size).run(call_everybody, numel)):
        assert found == [(other, (rank, "word", None)) for other in range(size) if other != rank]
        assert (matched, left) == (True, 0)


def ask_back(rank: int, depth: int) -> list[int]:
    """The ranks that were called, in turn, one by the other."""
    here = dist.get_rank()
    return [here] if depth == 0 else [here, *agents[-1].call(rank, ask_back, here, depth - 1)]


def call_each_other_deeply(rank: int, size: int) -> list[int]:
    with Agent() as agent:
        return agent.call(1 - rank, ask_back, rank, 20)


def test_a_function_calls_back(world: Worlds) -> None:
    assert world(2).run(call_each_other_deeply) == [[1, 0] * 10 + [1], [0, 1] * 10 + [0]]


def fail(words: str) -> None:
    raise LookupError(words)


def leave() -> None:
    raise SystemExit(3)


class Failing:
    def __reduce__(self) -> Any:
        return fail, ("when unpickled",)


def describe_failures(rank: int, size: int) -> list[tuple[str, bool]]:
    """What calls that fail raise, and whether the function's traceback came with it."""
    found = []
    with Agent() as agent:
        for function, args in (
            (fail, ("not here",)),
            (leave, ()),
            (threading.Lock, ()),
            (identify, (Failing(),)),
        ):
            with pytest.raises(RuntimeError) as caught:
                agent.call(1 - rank, function, *args)
            found.append((str(caught.value), "Traceback" in str(caught.value.__cause__)))
        for other in (rank, size, -1):
            with pytest.raises(
                ValueError, match=f"a remote call to rank {other}: the other ranks are"
            ):
                agent.call(other, identify)
        with pytest.raises(TypeError, match="pickle"):
            agent.call(1 - rank, identify, agent.remote(1 - rank, list))
        assert agent.call(1 - rank, identify) == (1 - rank, ())
    return found


def test_whatever_fails_is_raised_by_the_caller(world: Worlds) -> None:
    due = [
        "LookupError: not here",
        "SystemExit: 3",
        "TypeError: cannot pickle",
        "LookupError: when unpickled",
    ]
    for failures in world(2).run(describe_failures):
        for (words, has_traceback), start in zip(failures, due, strict=True):
            assert words.startswith(start)
            assert has_traceback


def count_objects() -> int:
    return len(agents[-1].objects)


def drop_in_turn(rank: int, size: int) -> list[int]:
    """The number of objects on the other rank while references to them go."""
    with Agent() as agent:
        references = [agent.remote(1 - rank, list, [number]) for number in range(3)]
        assert [reference.to_here() for reference in references] == [[0], [1], [2]]
        left = [agent.call(1 - rank, count_objects)]
        while references:
            references.pop(0)
            left.append(agent.call(1 - rank, count_objects))
    return left


def test_an_object_is_kept_as_long_as_its_reference(world: Worlds) -> None:
    assert world(2).run(drop_in_turn) == [[3, 2, 1, 0]] * 2


def run_kept(tensor: torch.Tensor) -> torch.Tensor:
    return kept[0](tensor)


def gradients_of_kept() -> list[torch.Tensor]:
    return [param.grad for param in kept[0].parameters()]


def backward_over_ranks(rank: int, size: int) -> list[bool]:
    """Whether gradients through a layer on each other rank, in turn, are those of one process."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 4).double() for _ in range(size)]
    inputs = torch.randn(3, 4).double()
    kept[:] = [layers[rank]]
    with Agent() as agent:
        if rank > 0:
            return []
        outputs, alone = inputs, inputs
        for other in agent.others:
            outputs = apply_remotely(agent, other, run_kept, outputs).tanh()
            alone = layers[other](alone).tanh()
        outputs.square().sum().backward()
        alone.square().sum().backward()
        there = [
            gradient for other in agent.others for gradient in agent.call(other, gradients_of_kept)
        ]
    here = [param.grad for layer in layers[1:] for param in layer.parameters()]
    return [torch.allclose(one, other) for one, other in zip(there, here, strict=True)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_backward_crosses_every_rank(size: int, world: Worlds) -> None:
    """The inputs need no gradients, the parameters on the other ranks do."""
    assert world(size).run(backward_over_ranks)[0] == [True] * 2 * (size - 1)
