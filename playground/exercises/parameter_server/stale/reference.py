from typing import Any

import torch
import torch.distributed as dist


def stale(
    rank: int,
    size: int,
    parameters: torch.Tensor,
    steps: int,
    staleness: int,
    workers: Any,
) -> None:
    """Rank 0 serves workers of different speed: each pushes `steps` gradients,
    and gets the parameters after each, when it is not more than `staleness`
    pushes ahead of the slowest.

    workers.next_push() waits for a push, and returns (worker, gradient).
    workers.reply(worker, parameters) sends them to a worker that waits; then it
    computes its next gradient.
    """
    if rank > 0:  # a worker
        for _ in range(steps):
            dist.send(torch.tensor(10**rank), 0)
            dist.recv(parameters, 0)
        return
    # write this
    pushes = dict.fromkeys(range(1, size), 0)
    waiting = []
    for _ in range(steps * (size - 1)):
        worker, gradient = workers.next_push()
        parameters += gradient
        pushes[worker] += 1
        waiting.append(worker)
        slowest = min(pushes.values())
        for each in waiting.copy():
            if pushes[each] - slowest <= staleness:
                workers.reply(each, parameters)
                waiting.remove(each)
    # until here
