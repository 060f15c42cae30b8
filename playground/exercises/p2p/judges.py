"""Judges of the exercises on p2p."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from playground.exercises.cases import Case, Cases, coded, inputs
from playground.exercises.exercise import COLLECTIVES, COMPUTES, MESSAGES
from playground.exercises.observation import OWN
from playground.runtime.rank.rank import report
from playground.runtime.tap.replacement import replaced


def handover(rank: int, size: int, seed: int) -> Cases:
    """The first message: from rank 0 to rank 1, past all others."""
    for about, give in inputs():
        tensor = give(rank)
        most = {1: len(tensor)} if rank == 0 else {}
        yield Case(
            about, (tensor,), held=tensor, expected=give(0 if rank == 1 else rank), most=most
        )


def swap(rank: int, size: int, seed: int) -> Cases:
    """Two ranks exchange tensors, and only the order of their calls keeps them from waiting for
    each other."""
    partner = rank ^ 1 if rank ^ 1 < size else rank
    for about, give in inputs():
        tensor = give(rank)
        run = partial(swap_apart, rank, size, tensor)
        returns = {"returned": give(partner), OWN: give(rank)}
        yield Case(
            about,
            (tensor,),
            returns=returns,
            run=run,
            most={partner: len(tensor)} if partner != rank else {},
        )


def swap_apart(
    rank: int, size: int, tensor: torch.Tensor, function: Callable[..., object]
) -> dict[str, object]:
    """The solution's return value after its own tensor was overwritten, and that tensor before."""
    returned = function(rank, size, tensor)
    own = tensor.clone()
    tensor.zero_()
    return {"returned": returned, OWN: own}


def shift(rank: int, size: int, seed: int) -> Cases:
    """Requests: between a call and its wait(), a tensor belongs to the backend."""
    for place, (about, give) in enumerate(inputs()):
        tensor = give(rank)
        due = give((rank - 1) % size)
        most = {(rank + 1) % size: len(tensor)}
        delay = 0.02 * ((rank + place) % 2)
        yield Case(about, (tensor,), held=tensor, expected=due, most=most, delay=delay)


def token_ring(rank: int, size: int, seed: int) -> Cases:
    """A token goes round: somebody has to begin."""
    for about, give in inputs():
        tensor, added = give(rank), range(size) if rank == 0 else range(rank + 1)
        total = sum(give(other) for other in added)
        most, held = {(rank + 1) % size: len(tensor)}, {OWN: tensor}
        yield Case(
            about, (tensor,), returns=total, held=held, expected={OWN: give(rank)}, most=most
        )


SIGN = 3
"""A tag of the judge's own."""


def anyone(rank: int, size: int, seed: int) -> Cases:
    """Receive from whoever sends: the sender is what recv returns, and tags keep kinds of messages
    apart."""
    orders = (
        "in order",
        "last rank first",
        "letters last rank first",
        "rank 1 only after a parcel of another",
    )
    for place, order in enumerate(orders[: 3 if size == 2 else 4]):
        given = [(coded(other, 3), 2 * coded(other, 3)) for other in range(size)]
        returns = [list(each) for each in zip(*given, strict=True)] if rank == 0 else None
        delay = 0.08 * (size - rank if place == 1 else rank)
        run = (
            partial((send_slowly, let_rank_1_wait)[place - 2], rank, size, given[rank])
            if place >= 2
            else None
        )
        most = {0: 6, 1: 1} if rank else {}  # to rank 1 goes a sign of the judge's own
        yield Case(
            f"they come {order}", given[rank], returns=returns, delay=delay, run=run, most=most
        )


def send_slowly(
    rank: int, size: int, given: tuple[object, object], function: Callable[..., object]
) -> object:
    """Between a parcel and its letter lies the longer, the lower the rank is."""
    return run_with(
        partial(time.sleep, 0.16 * (size - rank) * (rank > 0)),
        partial(function, rank, size, *given),
    )


def let_rank_1_wait(
    rank: int, size: int, given: tuple[object, object], function: Callable[..., object]
) -> object:
    """Rank 1 comes when the last rank's first send has returned, or that rank calls anything
    else."""
    sign, last = torch.zeros(1), size - 1
    # not those that are recorded
    send, recv = (each.__wrapped__ for each in (dist.send, dist.recv))
    if rank == 1:
        report(at=(f"comes after rank {last}'s parcel", None, 0))
        recv(sign, last, tag=SIGN)
        time.sleep(0.16)  # the last rank goes on, too
        report(at=COMPUTES)
    signs = iter([partial(send, sign, 1, tag=SIGN)] if rank == last else [])
    return run_with(lambda: next(signs, bool)(), partial(function, rank, size, *given))


def run_with(pause: Callable[[], object], solve: Callable[[], object]) -> object:
    """Solve, with a pause after each send, and before each other call."""

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if real.__name__ != "send":
                pause()
                return real(*args, **kwargs)
            sent = real(*args, **kwargs)
            pause()
            return sent

        return call

    with contextlib.ExitStack() as replacements:
        for name in (*MESSAGES, *COLLECTIVES):
            replacements.enter_context(replaced(dist, name, wrap))
        return solve()


def column(rank: int, size: int, seed: int) -> Cases:
    """A column is a view whose elements do not lie side by side: it is sent, and received, by way
    of a copy."""
    for about, give in inputs(16, 16, 9):
        side = int(give(0).numel() ** 0.5)
        matrix, expected = give(rank).view(side, side), give(rank).view(side, side)
        index = side - 2
        if rank == 1:
            expected[:, index] = give(0).view(side, side)[:, index]
        most = side if rank == 0 else 0
        yield Case(about, (matrix, index), held=matrix, expected=expected, most=most)


def lost_token(rank: int, size: int, seed: int) -> Cases:
    """A route of all ranks, and their numbers, of which one is zero: not that of an end."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        route = draw.sample(range(size), size)
        numbers = [10**other for other in range(size)]
        culprit = route[draw.randrange(1, size - 1)]
        numbers[culprit] = 0
        about = f"the route {', '.join(map(str, route))}"
        yield Case(about, (route, numbers[rank]), sum(numbers), is_coded=False, culprit=culprit)
