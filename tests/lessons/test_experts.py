"""experts: a mixture of experts over ranks is that of one process, wherever its tokens go."""

from __future__ import annotations

import contextlib
import io
import math
import re
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds
from ranks import misbehave
from torch import nn

from playground.lessons.experts import experiment
from playground.lessons.experts.lesson import (
    DenseExperts,
    Experts,
    Router,
    backward,
    balance_loss,
    compare,
    draw,
    new_expert,
    replace_mlps,
    splits,
)
from playground.lessons.experts.page import WAYS, ExpertsSettings, K, check_rank
from playground.lessons.tensor.lesson import GPTConfig, copying, new_gpt
from playground.runtime.errors import PlaygroundError, UsageError
from playground.training.gpt_config import LAYERS, LENGTH
from playground.training.one_process import EXACT

WIDTH, EXPERTS = 6, 5
TOKENS = {"as many": [7, 7, 7, 7], "uneven": [3, 0, 1, 5]}
"""Of each rank of a group, in the order of its ranks."""
ROUTINGS = {
    "any": [0.0] * EXPERTS,
    "all to one": [0.0, 0.0, 0.0, 90.0, 0.0],
    "none to the first ranks": [-90.0, -90.0, -90.0, 0.0, 0.0],
    "none to the last rank": [0.0, 0.0, 0.0, -90.0, -90.0],
}
"""What is added to the scores of the experts."""


def new_layer(kind: Any, k: int, routing: str, **options: Any) -> Any:
    router = Router(WIDTH, EXPERTS, k)
    draw(router, 1)
    with torch.no_grad():
        router.scores.weight[:, 0] += torch.tensor(ROUTINGS[routing])
    return kind(router, partial(new_expert, WIDTH, 9, 2), **options).double()


def largest_difference(
    group: Any, members: tuple[int, ...], tokens: str, k: int, routing: str, capacity: float
) -> tuple[float, int]:
    """From one process, of the output, the balance loss and all gradients; and the tokens that this
    rank has got."""
    size, rank = len(members), dist.get_rank(group)
    torch.manual_seed(3)
    counts = TOKENS[tokens][:size]
    hidden, dout = torch.randn(2, sum(counts), WIDTH).double()
    hidden[..., 0] = 1.0
    whole = new_layer(DenseExperts, k, routing, capacity=capacity, parts=1)
    layer = new_layer(Experts, k, routing, capacity=capacity, group=group)
    inputs = [hidden.clone().requires_grad_(), hidden.split(counts)[rank].clone().requires_grad_()]
    expected, found = [whole(part) for part in inputs[0].split(counts)], layer(inputs[1])
    whole(inputs[0])  # for the balance of all tokens
    ((torch.cat(expected) * dout).sum() / size + whole.balance_loss).backward()
    backward((found * dout.split(counts)[rank]).sum() + layer.balance_loss, layer, group)
    balance = layer.balance_loss.detach().clone()
    dist.all_reduce(balance, group=group)
    of_inputs = inputs[0].grad.split(counts)[rank], inputs[1].grad
    pairs = [(expected[rank], found), of_inputs, (whole.balance_loss, balance / size)]
    params = dict(whole.named_parameters())
    pairs += [(params[name].grad, param.grad) for name, param in layer.named_parameters()]
    received = sum(splits(layer.after_capacity, group)[1])
    return max((ours - theirs).abs().sum().item() for ours, theirs in pairs), received


@pytest.mark.parametrize("k", [1, 2])
def test_a_router_chooses_the_most_probable_and_its_weights_add_up_to_1(k: int) -> None:
    router = draw(Router(WIDTH, EXPERTS, k), 1).double()
    probabilities, weights, chosen = router(torch.randn(9, WIDTH).double())
    assert probabilities.sum(-1).allclose(torch.ones(9).double())
    assert chosen.equal(probabilities.argsort(-1, descending=True)[:, :k])
    assert weights.sum(-1).allclose(torch.ones(9).double())
    assert (weights[:, :1] / weights).allclose(
        probabilities.amax(-1, keepdim=True) / probabilities.gather(-1, chosen)
    )


def test_experts_are_all_different_and_k_of_them_as_large_as_an_mlp() -> None:
    """Not all would be chosen, were they the same at the start."""
    model, config = new_gpt(GPTConfig(), 1), GPTConfig()
    replace_mlps(model, EXPERTS, 2, 1, partial(DenseExperts, capacity=math.inf, parts=1))
    inner = [expert[0].weight for block in model[1:-1] for expert in block.experts.experts.values()]
    assert {weight.shape for weight in inner} == {(4 * config.width // 2, config.width)}
    assert len({weight.detach().numpy().tobytes() for weight in inner}) == config.layers * EXPERTS


def by_every_group(
    rank: int, size: int, ranks_of_groups: tuple[tuple[int, ...], ...]
) -> list[tuple[float, int]]:
    cases: list[Any] = [*product(TOKENS, (1, 2), ROUTINGS, (math.inf, 0.6, 0.0))]
    groups = {members: dist.new_group(list(members)) for members in ranks_of_groups}
    mine: list[Any] = [(group, members) for members, group in groups.items() if rank in members]
    return [largest_difference(*each, *case) for each in mine for case in cases]


@pytest.mark.parametrize(
    "groups",
    [
        ((2,), (0, 1, 3)),
        pytest.param(((2,), (1, 3), (0, 1, 3), (0, 1, 2, 3)), marks=pytest.mark.stress),
    ],
)
def test_any_routing_is_one_process_s(groups: tuple[tuple[int, ...], ...], world: Worlds) -> None:
    found = [each for rank in world(4).run(by_every_group, groups) for each in rank]
    assert len(found) == sum(map(len, groups)) * 48
    assert max(difference for difference, _ in found) <= EXACT
    assert min(received for _, received in found) == 0


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.stress) for size in (1, 3, 4))]
)
def test_training_is_one_process_s_and_sends_its_rows(world: Worlds, size: int) -> None:
    ways, capacity = (("balanced",), 1.0) if size == 2 else (tuple(WAYS), 0.0)
    settings = ExpertsSettings(size=size, steps=1, batch_size=12, capacity=capacity, ways=ways)
    ranks = world(size).run(experiment.run, settings)
    for found in ranks:
        for way, figures in zip(ways, found, strict=True):
            check_rank(way, figures, settings)
            assert (figures.dropped > 0) == (capacity > 0)
    for figures in zip(*ranks, strict=True):  # of a way
        total = {
            name: sum(getattr(rank, name) for rank in figures)
            for name in ("computed", "dropped", "sent_tokens")
        }
        assert total["computed"] + total["dropped"] == K * settings.batch_size * LENGTH * LAYERS
        assert total["sent_tokens"] == sum(rank.received_tokens for rank in figures)


def gradients_of_routers(rank: int, size: int) -> list[torch.Tensor]:
    """After a step by each way, in one row."""
    found = []
    for way in WAYS:
        model, step = experiment.new_training(
            way, ExpertsSettings(size=size, batch_size=2), Experts, size
        )
        step(*copying(2, torch.Generator().manual_seed(1)))
        found.append(
            torch.cat([block.experts.router.scores.weight.grad.flatten() for block in model[1:-1]])
        )
    return found


def test_balance_is_part_of_the_balanced_way_s_loss(world: Worlds) -> None:
    [free, balanced], _ = world(2).run(gradients_of_routers)
    assert (free - balanced).abs().max() > 1e-6


@pytest.mark.stress
@pytest.mark.parametrize("seed", [1, 2])
def test_the_balance_loss_evens_out(world: Worlds, seed: int) -> None:
    [free, balanced], _ = world(2).run(experiment.run, ExpertsSettings(size=2, seed=seed, steps=40))
    assert balanced.most_over_mean < 1.9 < 2.3 < free.most_over_mean


@pytest.mark.parametrize(
    ("size", "message"), [(12, "12 ranks for 8 experts"), (5, "24 sequences on 5 ranks")]
)
def test_numbers_of_ranks_that_do_not_fit_are_refused(size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ExpertsSettings(size=size)


def reach_the_edges(rank: int, size: int) -> None:
    hidden = torch.ones(0, WIDTH, dtype=torch.float64, requires_grad=True)
    layer = new_layer(Experts, 2, "any")
    backward(layer(hidden).sum() + layer.balance_loss, layer)  # no tokens on any rank
    assert all(param.grad.eq(0).all() for param in layer.parameters())
    assert layer.balance_loss == 0
    with pytest.raises(
        ValueError, match="1 experts for 2 ranks: each rank needs one, so choose at least 2 experts"
    ):
        Experts(Router(WIDTH, 1, 1), partial(new_expert, WIDTH, 9, 2))
    with pytest.raises(ValueError, match=r"capacity -0.5: it must be 0 or above"):
        new_layer(Experts, 2, "any", capacity=-0.5)
    counts = torch.tensor([[70_000, 0], [0, 70_000]])
    assert balance_loss(torch.full((2, 2), 0.5).bfloat16(), counts, 1).dtype == torch.bfloat16
    # 70,000 is no number of float16
    assert balance_loss(torch.full((70_000, 2), 0.5).half(), counts, 1) == 1


def test_no_tokens_and_too_few_experts(world: Worlds) -> None:
    world(2).run(reach_the_edges)


def go_wrong(rank: int, size: int, how: str) -> None:
    layer = new_layer(Experts, 2, "any")
    if how == "mismatch" and rank == 1:
        layer.router.scores = nn.Linear(WIDTH, EXPERTS + 1).double()
    elif rank == 1:
        layer.router.register_full_backward_pre_hook(lambda *_: misbehave(how))
    backward(layer(torch.randn(7, WIDTH, dtype=torch.float64)).sum() + layer.balance_loss, layer)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", "^rank 1 of 2 was killed by SIGKILL"),
        pytest.param("hang", "rank 1", marks=pytest.mark.stress),
        ("mismatch", "all_gather"),
    ],
)
def test_a_rank_that_fails_is_named(how: str, message: str, world: Worlds) -> None:
    with pytest.raises(PlaygroundError, match=message):
        world(2, timeout=3).run(go_wrong, how)


def print_comparison(rank: int, size: int) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        compare(rank, size)
    return printed.getvalue().splitlines()


@pytest.mark.parametrize(
    "size", [1, 2, *(pytest.param(size, marks=pytest.mark.stress) for size in (3, 4))]
)
def test_the_board_prints_that_nothing_differs_and_who_sends_how_many_tokens(
    world: Worlds, size: int
) -> None:
    lines = world(size).run(print_comparison)
    assert [apart for _, apart in lines] == [
        f"Rank {rank}, gradients: 0.0000000000 from one process" for rank in range(size)
    ]
    counts = [re.findall(r"\[(.*?)\]", tokens) for tokens, _ in lines]
    sent, received = (
        [[int(part) for part in each[way].split(", ")] for each in counts] for way in (0, 1)
    )
    assert received == [list(column) for column in zip(*sent, strict=True)]
    assert [sum(row) for row in sent] == [K * 4 * LENGTH] * size
