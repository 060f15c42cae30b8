"""All-reduce in two levels: inside every host, between the hosts, and inside again.

With two hosts of two ranks each, `|` between them:

    reduce-scatter inside    0 - 1 | 2 - 3    each rank has the sum of half the tensor, over its host
    all-reduce between       0 - 2,  1 - 3    ranks with the same half: the sum over all hosts
    all-gather inside        0 - 1 | 2 - 3    each rank has both halves

A ring over all ranks sends 2 (N - 1) / N * S bytes through the link of each host; this sends 2 (H - 1) / H * S, all
ranks of the host together, and waits 2 (H - 1) times for that link instead of 2 (N - 1) times. H is the number of
hosts, L that of ranks per host, N = H * L, and S the size of the tensor in bytes.

Hosts need not be alike. The one with the fewest ranks has L; on any other, the ranks beyond the first L hand their
tensor to one of these, sit out, and get the result back.

Inside hosts it sends messages, too, where ranks could share memory: so every step can be shown, and the cost follows
from the links at both levels.
Source: Mikami et al.: Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash (2018), arXiv 1811.05233, where
the two levels are the two directions of a torus
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from playground.algorithms.cost_model import ELEMENT, Cost, Counts, Task
from playground.algorithms.pipelined_ring import pipelined_ring, pipelined_ring_cost
from playground.algorithms.ring import all_gather, reduce_scatter

if TYPE_CHECKING:
    import torch

    from playground.algorithms.messages import Messages
    from playground.algorithms.operation import Add

INSIDE, BETWEEN = "inside hosts", "between hosts"


def hierarchical(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """Reduce-scatter inside each host, all-reduce between hosts of each share, all-gather inside: few bytes leave a
    host, whatever the number of its ranks. On one host it is the ring.

    K is the number of pieces in which the pipelined ring between hosts sends a chunk.

    | rank      | messages                      | bytes                                         |
    |-----------|-------------------------------|-----------------------------------------------|
    | rank >= 0 | 2 * (L - 1) + 2 * (H - 1) * K | 2 * (L - 1) / L * S + 2 * (H - 1) / H * S / L |
    """
    hosts = messages.hosts
    mine, shares = hosts.of(messages.rank), hosts.smallest
    place = mine.index(messages.rank)
    if place >= shares:
        messages.phase = f"hand over {INSIDE}"
        messages.exchange(send=[(flat, mine[place % shares])])
        messages.phase = f"hand back {INSIDE}"
        messages.exchange(receive=[(flat, mine[place % shares])])
        return
    extra = mine[place + shares :: shares]
    add_up(extra, flat, add, messages)
    inside = messages.among(mine[:shares], INSIDE)
    reduce_scatter(flat, add, inside)
    if hosts.several:
        share = flat.tensor_split(shares)[place]
        between = messages.among([host[place] for host in hosts.members], BETWEEN)
        between.phase = "all-reduce"
        pipelined_ring(share, add, between)
    all_gather(flat, inside)
    messages.phase = f"hand back {INSIDE}"
    messages.exchange(send=[(flat, rank) for rank in extra])


def add_up(extra: tuple[int, ...], flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """Add what these ranks of the host hand over, one after the other."""
    messages.phase = f"hand over {INSIDE}"
    arrived = flat.new_empty(flat.shape if extra else 0)
    for rank in extra:
        messages.exchange(receive=[(arrived, rank)])
        add(flat, arrived)


def hierarchical_cost(task: Task) -> Cost:
    """Two rings: inside, of a chunk per rank of a host; between, of one rank per host, on that chunk.

    The last host may have fewer ranks than the others, whose further ones then hand over and get back whole tensors.
    """
    hosts = ceil(task.size / task.node)
    shares = min(task.node, task.size - (hosts - 1) * task.node)
    hops, chunk = 2 * (shares - 1), ceil(task.elements / shares) * ELEMENT
    beyond = 0 if hosts == 1 else task.node - shares
    turns = ceil(beyond / shares)
    handing = Counts(2, 2 * task.nbytes, task.nbytes)
    between = Cost.along([], Counts()) if hosts == 1 else pipelined_ring_cost(Task(hosts, chunk, batched=task.batched))
    inside = handing.times(turns) + Counts(hops, hops * chunk, hops / 2 * chunk)
    rings = Counts(hops * min(shares, task.elements), hops * task.nbytes, hops / 2 * task.nbytes).times(hosts)
    total = rings + handing.times(beyond * (hosts - 1)) + total_between(task, hosts, shares)
    return Cost(between.between, inside, total)


def total_between(task: Task, hosts: int, shares: int) -> Counts:
    """Totals over all rings between hosts: the first shares may have one element more; one without is not sent."""
    if hosts == 1:
        return Counts()
    least, more = divmod(task.elements, shares)
    total = Counts()
    for elements, rings in ((least + 1, more), (least, shares - more)):
        if elements:
            ring = Task(hosts, elements * ELEMENT, batched=task.batched)
            total += pipelined_ring_cost(ring).total.times(rings)
    return total
