"""Judges of the exercises on allreduce."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms.traffic import sent_by
from playground.exercises.cases import Case, Cases, digits, inputs, predict
from playground.exercises.observation import OWN
from playground.lessons.all_reduce.lesson import measure, reduce_broadcast, ring as ring_by_hand
from playground.tap import MESSAGES, Call, Observer, observing
from playground.world.rendezvous.agreement import all_gather_object


def chain(rank: int, size: int, seed: int) -> Cases:
    """All-reduce with nothing but send and recv: the sum goes along a line of ranks and comes
    back."""
    for about, give in inputs():
        tensor, total = give(rank), sum(give(other) for other in range(size))
        yield Case(
            about,
            (tensor,),
            held=tensor,
            expected=total,
            most=dict.fromkeys((rank - 1, rank + 1), len(tensor)),
        )


def reduce_scatter(rank: int, size: int, seed: int) -> Cases:
    """The first half of the ring: every chunk travels round once, and is added to on its way."""
    for about, give in inputs():
        tensor, total = give(rank), sum(give(other) for other in range(size))
        chunks = tensor.tensor_split(size)
        most = {(rank + 1) % size: len(tensor) - len(chunks[rank])}
        yield Case(
            about, (tensor,), held=chunks[rank], expected=total.tensor_split(size)[rank], most=most
        )


def all_gather(rank: int, size: int, seed: int) -> Cases:
    """The second half of the ring: what a rank has received, it passes on."""
    for about, give in inputs():
        tensor, everyones = give(rank), [give(other) for other in range(size)]
        most, held = {(rank + 1) % size: len(tensor) * (size - 1)}, {OWN: tensor}
        yield Case(
            about, (tensor,), returns=everyones, held=held, expected={OWN: give(rank)}, most=most
        )


def ring(rank: int, size: int, seed: int) -> Cases:
    """The whole ring: a reduce-scatter, then the sums go round once more. No rank sends two whole
    tensors."""
    for about, give in inputs():
        tensor, total = give(rank), sum(give(other) for other in range(size))
        yield Case(
            about,
            (tensor,),
            held=tensor,
            expected=total,
            most=2 * (size - 1) * -(-len(tensor) // size),
        )


def doubling(rank: int, size: int, seed: int) -> Cases:
    """Recursive doubling: few steps, whole tensors, and some care where the number of ranks is no
    power of two."""
    power = 1 << size.bit_length() - 1
    partners = [rank ^ 1 << bit for bit in range(power.bit_length() - 1)]
    extra = [rank + power] if rank + power < size else []
    receivers = [rank - power] if rank >= power else partners + extra
    for about, give in inputs():
        tensor, total = give(rank), sum(give(other) for other in range(size))
        yield Case(
            about,
            (tensor,),
            held=tensor,
            expected=total,
            most=dict.fromkeys(receivers, len(tensor)),
        )


def ring_traffic(rank: int, size: int, seed: int) -> Cases:
    """The messages of the lesson's ring, of which a rank sends one in each step, and of its
    reduce_broadcast, counted on all ranks."""
    for elements in (4 * size, 4 * size + 3, 1000):
        (steps, in_ring), (_, with_root) = (
            measure(way, digits(rank, elements, torch.float32))
            for way in (ring_by_hand, reduce_broadcast)
        )
        counted = {
            "messages": steps,
            "all_bytes": sum(all_gather_object(in_ring)),
            "root_bytes": all_gather_object(with_root)[0],
        }
        yield predict(f"{elements} elements", (size, elements), counted)


class BetweenHosts(Observer):
    """Counts the bytes that this rank sends to other hosts, of `each` ranks: a call that takes
    ranks of several hosts sends all it sends there."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.sent = 0.0

    def begun(self, call: Call) -> None:
        is_message = call.method in MESSAGES and call.peer is not None
        ranks = (dist.get_rank(), call.peer) if is_message else call.ranks
        if len({rank // self.each for rank in ranks if rank is not None}) > 1:
            self.sent += sent_by(call)


def call_observed(
    counter: BetweenHosts, rank: int, size: int, tensor: torch.Tensor, inner: Any, across: Any,
    function: Callable[..., Any],
) -> None:  # fmt: skip
    with observing(counter):
        function(rank, size, tensor, inner, across)


def describe_crossing(
    tensor: torch.Tensor, counter: BetweenHosts, limit: float
) -> dict[str, object]:
    """What a rank holds, and what it has sent to other hosts, where `limit` bytes are enough."""
    is_within = counter.sent <= limit + 0.5
    sent = f"at most {limit:.0f} bytes" if is_within else f"{counter.sent:.0f} bytes"
    return {"tensor": tensor, "to other hosts": sent}


def hierarchical(rank: int, size: int, seed: int) -> Cases:
    """All-reduce by way of hosts. An observer counts what leaves the host."""
    for each in (each for each in (2, 3) if size % each == 0 and each < size):
        hosts = size // each
        inner = [dist.new_group([*range(host * each, host * each + each)]) for host in range(hosts)]
        across = [dist.new_group([*range(place, size, each)]) for place in range(each)]
        for about, give in inputs(12, 12, 24):
            tensor, total = give(rank), sum(give(other) for other in range(size))
            counter = BetweenHosts(each)
            limit = 2 * (hosts - 1) / hosts * tensor.nbytes / each
            given = (tensor, inner[rank // each], across[rank % each])
            yield Case(
                f"{hosts} hosts of {each} ranks, {about}",
                (),
                run=partial(call_observed, counter, rank, size, *given),
                held=partial(describe_crossing, tensor, counter, limit),
                expected={"tensor": total, "to other hosts": f"at most {limit:.0f} bytes"},
            )
