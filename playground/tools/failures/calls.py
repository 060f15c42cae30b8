"""Calls that do not match: the ranks call different things, or some ranks call nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist


def other_order(rank: int, size: int) -> float:
    """Rank 1 calls two collectives in a different order from the others."""
    loss, weight = torch.tensor([rank + 1.0]), torch.ones(1)
    if rank == 1:
        dist.broadcast(weight, src=0)
        dist.all_reduce(loss)
    else:
        dist.all_reduce(loss)
        dist.broadcast(weight, src=0)
    return loss.item()


def other_order_cured(rank: int, size: int) -> float:
    loss, weight = torch.tensor([rank + 1.0]), torch.ones(1)
    dist.all_reduce(loss)
    dist.broadcast(weight, src=0)
    return loss.item()


def absent_rank(rank: int, size: int) -> float:
    """Rank 0 alone calls a collective, because it alone needs the result."""
    loss = torch.tensor([rank + 1.0])
    if rank == 0:
        dist.all_reduce(loss)
    return loss.item()


def absent_rank_cured(rank: int, size: int) -> float:
    loss = torch.tensor([rank + 1.0])
    dist.all_reduce(loss)
    return loss.item()


def unequal_batches(rank: int, size: int) -> float:
    """Rank 0 has one more batch than the others, and no rank averages its last gradient with it."""
    total = torch.zeros(1)
    for batch in range(rank, 2 * size + 1, size):
        gradient = torch.tensor([float(batch)])
        dist.all_reduce(gradient)
        total += gradient
    return total.item()


def unequal_batches_cured(rank: int, size: int) -> float:
    total = torch.zeros(1)
    for batch in range(rank, 2 * size, size):
        gradient = torch.tensor([float(batch)])
        dist.all_reduce(gradient)
        total += gradient
    return total.item()


def other_shape(rank: int, size: int) -> float:
    """The last batch of rank 1 is shorter, and so is its tensor of losses."""
    losses = torch.ones(3 if rank == 1 else 4)
    dist.all_reduce(losses)
    return losses.sum().item()


def other_shape_cured(rank: int, size: int) -> float:
    losses = torch.ones(3 if rank == 1 else 4).sum()
    dist.all_reduce(losses)
    return losses.sum().item()


def other_dtype(rank: int, size: int) -> float:
    """Rank 1 counts in integers, the others in floating point; the same bits mean different
    numbers."""
    count = torch.tensor([7]).int() if rank == 1 else torch.tensor([7.0])
    dist.all_reduce(count)
    return count.item()


def other_dtype_cured(rank: int, size: int) -> float:
    count = torch.tensor([7.0])
    dist.all_reduce(count)
    return count.item()


def wrong_root(rank: int, size: int) -> float:
    """Every rank names itself as the root of a broadcast."""
    weight = torch.tensor([rank + 1.0])
    dist.broadcast(weight, src=rank)
    return weight.item()


def wrong_root_cured(rank: int, size: int) -> float:
    weight = torch.tensor([rank + 1.0])
    dist.broadcast(weight, src=0)
    return weight.item()


def partial_group(rank: int, size: int) -> float:
    """Only the members of a group create it, so the ranks disagree about which group comes next."""
    loss = torch.tensor([rank + 1.0])
    if rank < size - 1:
        dist.new_group([*range(size - 1)])
    everyone = dist.new_group([*range(size)])
    dist.all_reduce(loss, group=everyone)
    return loss.item()


def partial_group_cured(rank: int, size: int) -> float:
    loss = torch.tensor([rank + 1.0])
    dist.new_group([*range(size - 1)])
    everyone = dist.new_group([*range(size)])
    dist.all_reduce(loss, group=everyone)
    return loss.item()


def send_send(rank: int, size: int) -> float:
    """Every rank sends first, and none gets to receive."""
    mine, theirs = torch.tensor([rank + 1.0]), torch.zeros(1)
    dist.send(mine, dst=(rank + 1) % size)
    dist.recv(theirs, src=(rank - 1) % size)
    return theirs.item()


def send_send_cured(rank: int, size: int) -> float:
    mine, theirs = torch.tensor([rank + 1.0]), torch.zeros(1)
    sent = dist.isend(mine, dst=(rank + 1) % size)
    dist.recv(theirs, src=(rank - 1) % size)
    sent.wait()
    return theirs.item()


def wrong_tag(rank: int, size: int) -> float:
    """Sender and receiver each use their own rank as the tag of the message."""
    tensor = torch.tensor([rank + 1.0])
    if rank == 0:
        dist.send(tensor, dst=1, tag=rank)
    elif rank == 1:
        dist.recv(tensor, src=0, tag=rank)
    return tensor.item()


def wrong_tag_cured(rank: int, size: int) -> float:
    tensor = torch.tensor([rank + 1.0])
    if rank == 0:
        dist.send(tensor, dst=1, tag=0)
    elif rank == 1:
        dist.recv(tensor, src=0, tag=0)
    return tensor.item()


def message_size(rank: int, size: int) -> float:
    """Rank 1 receives into a smaller tensor than rank 0 sends."""
    tensor = torch.full((4 if rank == 0 else 2,), rank + 1.0)
    if rank == 0:
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    return tensor.sum().item()


def message_size_cured(rank: int, size: int) -> float:
    tensor = torch.full((4,), rank + 1.0)
    if rank == 0:
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    return tensor.sum().item()
