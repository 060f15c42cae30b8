"""Steps of a lesson: each returns plain data, and what a backend cannot do is an outcome too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds

from playground.runtime.errors import PlaygroundError, RankFailed
from playground.runtime.rank.steps import check_outcome, run_steps
from playground.runtime.remote import Remote


@dataclass
class Told:
    value: int


def draw(rank: int, size: int) -> dict[str, float]:
    return {"drawn": torch.rand(1).item()}


def tell(rank: int, size: int) -> Told:
    return Told(size)


def be_refused(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BXOR)


def have_a_bug(rank: int, size: int) -> None:
    raise ValueError("a bug of the step's own")


def step(function: Any) -> Remote:
    return Remote(__name__, function.__name__)


def test_outcomes_are_in_order_and_the_same_for_a_seed(world: Worlds) -> None:
    one = world(1)
    [[first, told, second]] = one.run(run_steps, [step(draw), step(tell), step(draw)], 7)
    assert told == Told(1)
    assert first != second
    assert one.run(run_steps, [step(draw)], 7) == [[first]]
    assert one.run(run_steps, [step(draw)], 8) != [[first]]


def test_what_the_backend_cannot_do_is_an_outcome_in_its_words(world: Worlds) -> None:
    [[refused, told]] = world(1).run(run_steps, [step(be_refused), step(tell)])
    assert "BXOR" in refused["refused"]
    assert told == Told(1)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (None, "step sum returned nothing: return plain data"),
        (3, "step sum returned a int: "),
        (Told, "step sum returned a type: "),
        ({"after": torch.ones(1)}, "step sum returned a Tensor in 'after': "),
        ({"before": 1, "after": [1, torch.ones(1)]}, "step sum returned a Tensor in 'after': "),
    ],
)
def test_what_is_not_plain_data_is_refused(outcome: Any, words: str) -> None:
    with pytest.raises(PlaygroundError) as caught:
        check_outcome("sum", outcome)
    assert str(caught.value).startswith(words)


def test_a_bug_is_no_refusal(world: Worlds) -> None:
    with pytest.raises(RankFailed, match="a bug of the step's own"):
        world(1).run(run_steps, [step(have_a_bug)])
