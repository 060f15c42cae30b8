"""Processes in trouble: one dies, is stopped, lags behind, or fails where the others do not."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from playground.world import restart_count


def killed(rank: int, size: int) -> float:
    """Rank 1 is killed, as by the kernel when memory is short, and the work of all ranks is
    lost."""
    first, total = 0, torch.zeros(1)
    for step in range(first, 4):
        if (rank, step, restart_count()) == (1, 2, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = torch.tensor([rank + 1.0])
        dist.all_reduce(gradient)
        total += gradient
    return total.item()


def killed_cured(rank: int, size: int) -> float:
    first, total = 0, torch.zeros(1)
    if restart_count():
        first, total = torch.load("step.pt")
    for step in range(first, 4):
        if (rank, step, restart_count()) == (1, 2, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = torch.tensor([rank + 1.0])
        dist.all_reduce(gradient)
        total += gradient
        if rank == 0:
            torch.save((step + 1, total), "new.pt")
            os.replace("new.pt", "step.pt")
    return total.item()


def stopped(rank: int, size: int) -> float:
    """Rank 1 is stopped, as by Ctrl-Z or a debugger, and the others wait for it."""
    tensor, pids = torch.tensor([rank + 1.0]), [0] * size
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(pids[1], signal.SIGSTOP)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return tensor.item()


def stopped_cured(rank: int, size: int) -> float:
    tensor, pids = torch.tensor([rank + 1.0]), [0] * size
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(pids[1], signal.SIGSTOP)
    work = dist.all_reduce(tensor, async_op=True)
    while rank == 0 and not work.is_completed():
        time.sleep(0.1)
        os.kill(pids[1], signal.SIGCONT)  # what `fg` sends
    work.wait()
    return tensor.item()


def straggler(rank: int, size: int) -> int:
    """Rank 1 prepares everybody's samples while the others wait."""
    samples = 20 * size if rank == 1 else 0
    for _ in range(samples):
        time.sleep(0.05)
    total = torch.tensor([samples])
    dist.all_reduce(total)
    return int(total)


def straggler_cured(rank: int, size: int) -> int:
    samples = 20
    for _ in range(samples):
        time.sleep(0.05)
    total = torch.tensor([samples])
    dist.all_reduce(total)
    return int(total)


def collective_in_finally(rank: int, size: int) -> float:
    """Rank 1 raises, then waits in `finally` for ranks that wait for it: its error is never
    shown."""
    loss = torch.ones(1)
    try:
        if rank == 1:
            raise ValueError("a damaged sample")
        dist.all_reduce(loss)
    finally:
        dist.barrier()
    return loss.item()


def collective_in_finally_cured(rank: int, size: int) -> float:
    loss = torch.ones(1)
    try:
        if rank == 1:
            raise ValueError("a damaged sample")
    except ValueError:
        loss.zero_()
    dist.all_reduce(loss)
    dist.barrier()
    return loss.item()
