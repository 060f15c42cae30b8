"""scaling: what is timed is the work of a step, the laws are the sums of its parts, operations are
counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Run, Worlds
from one_process import EXACT
from ranks import TORCH
from torch.nn.utils import parameters_to_vector

from playground.lessons.gpt import GPT, LAYERS, C, T, V, make_batch
from playground.lessons.scaling import lesson as scaling

COMPUTE, UPDATE, MESSAGES = 0.25, 0.02, 0.1
"""Seconds."""


@pytest.mark.parametrize("size", [1, 2, 8, 64])
@pytest.mark.parametrize("messages", [0.0, MESSAGES])
def test_the_laws_are_the_times_of_the_parts(size: int, messages: float) -> None:
    """With the share of the step that N ranks do not divide, as both papers write them."""
    alone = COMPUTE + UPDATE
    serial, waiting = UPDATE / alone, messages / alone
    parts: Any = COMPUTE, UPDATE, messages, size
    by_amdahl = 1 / (serial + (1 - serial) / size + waiting)
    assert scaling.amdahl(*parts) == pytest.approx(by_amdahl)
    by_gustafson = (serial + (1 - serial) * size) / (1 + waiting)
    assert scaling.gustafson(*parts) == pytest.approx(by_gustafson)


def test_amdahl_s_law_has_a_limit_and_gustafson_s_has_none() -> None:
    laws: list[Any] = [scaling.amdahl, scaling.gustafson]
    strong, weak = (law(0.94, 0.06, 0.0, 10**9) for law in laws)
    assert strong == pytest.approx(1 / 0.06)
    assert weak == pytest.approx(0.94 * 10**9)


def averaged(rank: int, size: int) -> tuple[list[float], float]:
    """What becomes of gradients that are r + 1 everywhere; and the largest difference from one
    process of five steps of all ranks."""
    slow: Any = scaling
    torch.manual_seed(0)
    models = [GPT().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for param in models[0].parameters():
        param.grad = torch.full_like(param, rank + 1.0)
    slow.average_gradients(models[0], float("inf"))
    found = {gradient.item() for gradient in slow.gradients_of(models[0]).unique()}

    batch = make_batch(12, seed=0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(5):
        slow.plain_step(models[0], optimizers[0], batch)
        slow.train_step(models[1], optimizers[1], batch.chunk(size)[rank], 1000.0)
    whole, divided = (parameters_to_vector(model.parameters()) for model in models)
    return sorted(found), (whole - divided).abs().max().item()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_train_as_one_process_over_any_link(size: int, world: Worlds) -> None:
    for means, difference in world(size).run(averaged):
        assert means == [(size + 1) / 2]
        assert difference <= EXACT


def seconds_of_a_step(rank: int, size: int) -> tuple[float, float]:
    """The bits that a rank of a ring sends, and the seconds of an average over 0.1 Gbit/s."""
    timed: Any = scaling
    model = GPT()
    timed.compute_gradients(model, make_batch(2, seed=0))
    found = timed.measure({}, {"average": (timed.average_gradients, model, 0.1)})
    sent = 2 * (size - 1) * sum(param.nbytes for param in model.parameters()) / size
    return 8 * sent, found["average"]


@pytest.mark.parametrize("size", [2, 3])
def test_a_message_takes_at_least_as_long_as_its_link(size: int, world: Worlds) -> None:
    for bits, seconds in world(size).run(seconds_of_a_step):
        assert seconds >= bits / 1e8


def count_calls(rank: int, size: int) -> tuple[dict[str, int], set[str]]:
    called = Counter[str]()

    def count(name: str) -> None:
        called[name] += 1
        if name == "all":
            dist.all_reduce(torch.ones(1))

    measure: Callable[..., dict[str, float]] = scaling.measure
    seconds = measure({"one": (count, "one")}, {"all": (count, "all")})
    return dict(called), {name for name, each in seconds.items() if each > 0}


def test_rank_0_measures_one_process_while_the_others_wait(world: Worlds) -> None:
    first, *others = world(3).run(count_calls)
    assert first == ({"one": scaling.ROUNDS, "all": scaling.ROUNDS}, {"one", "all"})
    assert [called for called, _ in others] == [{"all": scaling.ROUNDS}] * 2


def batches_measured(rank: int, size: int) -> dict[Any, Any]:
    """The batch of each step that is timed, as lists."""
    found = {}

    measure: Callable[..., dict[Any, float]] = scaling.measure

    def keep(alone: dict[Any, Any], together: dict[Any, Any]) -> dict[Any, float]:
        for name, (_, *arguments) in (alone | together).items():
            if len(arguments) > 1 and name != "product" and name[0] != "messages":
                [batch] = (each for each in arguments if isinstance(each, torch.Tensor))
                found[name] = batch.tolist()
        return measure(alone, together)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "measure", keep)
        patch.setattr(scaling, "ROUNDS", 1)
        measure_steps: Callable[..., object] = scaling.measure_steps
        measure_steps(rank, size, GPT())
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_have_the_batches_of_one_process(size: int, world: Worlds) -> None:
    by_rank = world(size).run(batches_measured)
    for link in scaling.LINKS:
        for scaled, of_one in (("strong", "step"), ("weak", "big step")):
            together = [row for found in by_rank for row in found[scaled, link]]
            assert together == by_rank[0][of_one]
    assert len(by_rank[0]["step"]) == len(by_rank[0]["weak", "no link"]) == scaling.SEQUENCES
    assert by_rank[0]["forward, backward"] == by_rank[0]["step"]


def test_operations_are_six_for_each_parameter_and_token() -> None:
    count: Callable[..., tuple[int, int]] = scaling.count_operations
    by_formula, counted = count(GPT())
    tokens = scaling.SEQUENCES * T
    weights = 12 * C**2 * LAYERS + C * V
    biases_and_norms = (3 + 1 + 4 + 1 + 4) * C * LAYERS + V + 2 * C
    assert by_formula == 6 * (weights + biases_and_norms) * tokens
    # two products forward and four backward; torch 2.15 counts the one that is computed again, too
    products_of_attention = (14 if TORCH >= (2, 15) else 12) * LAYERS * T * C * tokens
    assert 6 * weights * tokens <= counted <= 6 * weights * tokens + products_of_attention


def seconds_by_the_parts(size: int) -> dict[Any, float]:
    seconds: dict[Any, float] = {
        "forward, backward": COMPUTE, "optimizer.step": UPDATE, "step": COMPUTE + UPDATE,
        "big step": size * COMPUTE + UPDATE, "product": 0.01,
    }  # fmt: skip
    for number, link in enumerate(scaling.LINKS):
        messages = number * MESSAGES
        seconds["messages", link] = messages
        seconds["strong", link] = COMPUTE / size + UPDATE + messages
        seconds["weak", link] = COMPUTE + UPDATE + messages
    return seconds


@pytest.mark.parametrize("size", [2, 4])
def test_steps_that_take_as_long_as_their_parts_are_where_the_laws_say(
    size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    print_speedups: Callable[..., None] = scaling.print_speedups
    print_speedups(size, seconds_by_the_parts(size))
    parts, _, *rows = capsys.readouterr().out.splitlines()
    assert parts == "forward and backward 250.0 ms, optimizer.step 20.0 ms"
    assert len(rows) == len(scaling.LINKS)
    for row in rows:
        found = re.search(r" ms +(\S+) +(\S+) +(\S+) +(\S+)$", row)
        assert found
        strong, by_amdahl, weak, by_gustafson = map(float, found.groups())
        assert (strong, weak) == (by_amdahl, by_gustafson)
    assert float(rows[0].split()[-1]) > float(rows[-1].split()[-1])


def test_the_share_of_the_peak_is_of_the_product_s_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_share: Callable[..., None] = scaling.print_share_of_peak
    print_share(GPT(), seconds_by_the_parts(2))
    _, share = capsys.readouterr().out.splitlines()
    peak = 2 * 1024**3 / 0.01
    assert share == (
        f"one process reaches {1.053e9 / (COMPUTE + UPDATE) / peak:.0%} of the peak, "
        f"{peak / 1e9:.0f} GFLOP/s"
    )


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (1, "one rank has no other to divide its work with: choose 2 or more"),
        (3, "3 ranks cannot divide a batch of 32 equally"),
    ],
)
def test_numbers_of_ranks_that_it_cannot_use_are_refused_in_one_line(
    size: int, said: str, run_cli: Run
) -> None:
    ran = run_cli("scaling", "-n", size)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert said in ran.err
