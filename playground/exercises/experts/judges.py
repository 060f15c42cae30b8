"""Judges of the exercises on experts. Routes are random; every rank knows all of them, and what
comes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from playground.exercises.cases import UNEVEN, Case, Cases, counting, predict
from playground.lessons.experts import lesson
from playground.tap import Call, Observer, observing
from playground.world.rendezvous.agreement import all_gather_object

WIDTH, K = 2, 2
TO_ONE = "all rows to rank 0"


class Routed(NamedTuple):
    """A rank's tokens [tokens, width], on their way to K experts each, and the ranks of these
    [tokens, K]."""

    tokens: torch.Tensor
    owners: torch.Tensor

    def rows_for(self, owner: int) -> torch.Tensor:
        return self.tokens[(self.owners == owner).nonzero()[:, 0]]


def routings(size: int, seed: int) -> Iterator[tuple[str, list[Routed]]]:
    """Descriptions, and what all ranks have: numbers of tokens differ, all rows go to one rank, and
    at last there are so many that it shows who sends rows to all."""
    to_one = {TO_ONE: UNEVEN["1 sample on rank 0, 3 on rank 1, …"]}
    for about, counts in (UNEVEN | to_one | {"40 samples each": (40,) * 5}).items():
        torch.manual_seed(seed)
        ranks = []
        for rank in range(size):
            tokens = 100 * rank + torch.arange(WIDTH * counts[rank]).view(-1, WIDTH).double()
            ranks.append(Routed(tokens, torch.randint(size, (counts[rank], K)) * (about != TO_ONE)))
        yield about.replace("sample", "token"), ranks


def dispatch(rank: int, size: int, seed: int) -> Cases:
    """Rows of all ranks that are for this one."""
    for about, ranks in routings(size, seed):
        mine = ranks[rank]
        arrived = torch.cat([each.rows_for(rank) for each in ranks])
        rows = mine.tokens.repeat_interleave(K, 0)
        most = rows.numel() + 16 * size  # the second is for numbers of rows
        given = rows, mine.owners.flatten()
        run = partial(send_rows, rank, size, *given)
        yield Case(about, given, arrived, run=run, is_coded=False, most_moved=most)


class EqualParts(Observer):
    """Refuses to divide numbers of rows among more ranks than it has: gloo sends nothing then, and
    what arrives is undefined."""

    def begun(self, call: Call) -> None:
        is_divided = call.name == "all_to_all_single" and not call.args[3]  # the input's splits
        if is_divided and len(call.inputs[0]) < len(call.ranks):
            raise ValueError("fewer numbers than ranks are divided among them")


def send_rows(
    rank: int,
    size: int,
    rows: torch.Tensor,
    owners: torch.Tensor,
    function: Callable[..., object],
) -> object:
    with observing(EqualParts()):
        return function(rank, size, rows, owners)


def combine(rank: int, size: int, seed: int) -> Cases:
    """The expert of rank r multiplies by r + 2."""
    for about, ranks in routings(size, seed):
        mine = ranks[rank]
        came = [each.rows_for(rank) for each in ranks]
        sent = [len(mine.rows_for(each)) for each in range(size)]
        received = [len(rows) for rows in came]
        weights = torch.rand(mine.owners.shape).double()
        output = mine.tokens * (weights * (mine.owners + 2)).sum(1, keepdim=True)
        given = (
            torch.cat(came) * (rank + 2),
            received,
            sent,
            mine.owners.flatten().argsort(stable=True),
            weights,
        )
        yield Case(about, given, output, is_coded=False, most_moved=given[0].numel() + 16 * size)


def token_traffic(rank: int, size: int, seed: int) -> Cases:
    """The lesson's exchange of rows, with a table of how many rows go to which expert."""
    each = 2
    for about, factor in (("every expert gets as many", 0), ("some experts get more", 3)):
        counts = torch.tensor(
            [
                [2 + factor * ((owner + expert) % 3) for expert in range(each * size)]
                for owner in range(size)
            ]
        )
        counts[:, 0] += 5 * (factor > 0)
        rows = int(counts[rank].sum())
        tokens = torch.ones(rows, WIDTH, requires_grad=True)
        to_ranks = counts.view(size, size, each).sum(2)
        sent, received = to_ranks[rank].tolist(), to_ranks[:, rank].tolist()
        with counting() as out:
            arrived = lesson.AllToAll.apply(tokens, sent, received)
        with counting() as back:
            returned = lesson.AllToAll.apply(arrived, received, sent)
        with counting() as backward:
            returned.sum().backward()
        counted = {
            "rows": all_gather_object(len(arrived)),
            "dispatch": all_gather_object(round(out.sent)),
            "combine": all_gather_object(round(back.sent)),
            "backward": all_gather_object(round(backward.sent)),
        }
        yield predict(about, (counts.tolist(), WIDTH), counted)


def grads_or_zeros(params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Zeros for none: both are right where no token came."""
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in params]


def expert_gradients(rank: int, size: int, seed: int) -> Cases:
    """Gradients as backward leaves them: replicated ones have a digit for each rank, and those of
    experts are complete."""
    for about, experts, without in (("1 expert each", 1, None), ("2 experts each", 2, 1)):
        replicated = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))]
        own = [nn.Parameter(torch.zeros(2)) for _ in range(experts)]
        for param in replicated:
            param.grad = torch.full_like(param, size * 10.0**rank)
        for place, param in enumerate(own):
            param.grad = torch.full_like(param, size * (7.0 + rank + place))
        if without is not None and rank % 2:
            own[without].grad = None
        total = sum(10.0**other for other in range(size))
        due = [grad / size for grad in grads_or_zeros(own)]
        about_one = "" if without is None else ", one without tokens on odd ranks"
        yield Case(
            f"{about}{about_one}",
            (replicated, own),
            held=partial(describe_gradients, replicated, own),
            expected={
                "replicated": [torch.full((3,), total), torch.full((1,), total)],
                "expert": due,
            },
            is_coded=False,
            most_moved=8 * (size - 1),
        )


def describe_gradients(
    replicated: Sequence[nn.Parameter], own: Sequence[nn.Parameter]
) -> dict[str, object]:
    return {
        "replicated": [param.grad for param in replicated],
        "expert": grads_or_zeros(own),
    }
