"""A parameter server: one rank owns the parameters, the others compute gradients, each on a copy of
its own.

    torchrun --nproc-per-node 3 lesson.py
    python -m playground parameter-server
    python -m playground parameter-server --slow-worker 5
    python -m playground parameter-server -n 9 --mode async

Rank 0 is the server. A worker pulls the parameters, computes a gradient on its shard of a batch and
pushes it; the reply brings the parameters for the next one. When the server takes a step, and when
it replies, is the mode: synchronous, asynchronous, or in between. All that travels are remote
calls. No graph reaches from a worker into the server's parameters, so none breaks when they change.
Sources: Li et al., Scaling Distributed Machine Learning with the Parameter Server, 2014; Ho et al.,
More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, 2013
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from playground.lessons.partition import partition_dataset
from playground.lessons.rpc.lesson import Agent

SERVER = 0  # its rank; worker 0 is rank 1, and so on
Reply = tuple[torch.Tensor, bool]  # all parameters as one vector; whether the training has ended


class ParameterServer:
    """Owns the parameters and the optimizer. Workers call `pull` and `push`, each call in a thread
    of its own, until `steps` gradients for each worker have been taken.

    `mode`: "sync" waits for a gradient of every worker and takes one step with their mean, "async"
    takes a step with each gradient, and so does "stale-synchronous", but in it a worker waits that
    is more than `staleness` gradients ahead of the slowest.
    """

    def __init__(
        self, model: nn.Module, mode: str, workers: int, steps: int, lr: float = 0.05,
        momentum: float = 0.5, staleness: int = 3,
    ) -> None:  # fmt: skip
        self.params = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=lr, momentum=momentum)
        self.mode = mode
        self.workers = workers
        self.steps = steps
        self.staleness = staleness
        self.version = 0  # steps of the optimizer
        self.taken = [0] * workers  # gradients, by worker
        self.waiting: dict[int, torch.Tensor] = {}  # sync: gradients for the next step, by worker
        self.active = set(range(workers))  # they do not know yet that the training has ended
        self.changed = threading.Condition()

    def pull(self, worker: int) -> Reply:
        """The parameters as they are. A worker begins with this."""
        with self.changed:
            return self.reply(worker)

    def push(self, worker: int, gradient: torch.Tensor, loss: float) -> Reply:
        """Take a gradient; return the parameters when the worker may continue."""
        with self.changed:
            version = self.version
            if not self.finished:
                self.take(worker, gradient, loss)
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.finished or self.may_continue(worker, version))
            return self.reply(worker)

    def take(self, worker: int, gradient: torch.Tensor, loss: float) -> None:
        """Take a step, if it is time. A gradient counts 1 / workers in every mode, so that the same
        number of samples causes the same total update."""
        self.taken[worker] += 1
        if self.mode != "sync":
            self.step(gradient / self.workers)
            return
        self.waiting[worker] = gradient
        if len(self.waiting) == self.workers:  # added in one order, whichever came first
            self.step(sum(self.waiting[each] for each in range(self.workers)) / self.workers)
            self.waiting.clear()

    def step(self, gradient: torch.Tensor) -> None:
        for param, part in zip(self.params, unflatten(gradient, self.params), strict=True):
            param.grad = part.to(param.device)
        self.optimizer.step()
        self.version += 1

    def may_continue(self, worker: int, version: int) -> bool:
        """Whether a worker that pushed at `version` may have the parameters."""
        if self.mode == "sync":
            return self.version > version
        return self.mode == "async" or self.taken[worker] - min(self.taken) <= self.staleness

    def reply(self, worker: int) -> Reply:
        if self.finished:
            self.active.discard(worker)
            self.changed.notify_all()
        return flatten(self.params), self.finished

    @property
    def finished(self) -> bool:
        return sum(self.taken) == self.steps * self.workers and not self.waiting

    def join(self) -> None:
        """Wait until every worker knows that the training has ended."""
        with self.changed:
            self.changed.wait_for(lambda: not self.active)


servers: list[ParameterServer] = []  # on the server's rank: the one that answers


def pull(worker: int) -> Reply:
    return servers[0].pull(worker)


def push(worker: int, gradient: torch.Tensor, loss: float) -> Reply:
    return servers[0].push(worker, gradient, loss)


def serve(agent: Agent, server: ParameterServer) -> None:
    """Let the workers call `server`, which the agent's threads do, until the training has ended."""
    servers[:] = [server]
    agent.barrier()
    server.join()


def work(
    agent: Agent, worker: int, compute: Callable[[torch.Tensor], tuple[torch.Tensor, float]]
) -> None:
    """Compute gradients on copies of the parameters, and push them, until the server has enough."""
    agent.barrier()  # the server is there
    parameters, finished = agent.call(SERVER, pull, worker)
    while not finished:
        gradient, loss = compute(parameters)
        parameters, finished = agent.call(SERVER, push, worker, gradient, loss)


def compute_gradient(
    model: nn.Module, loss_fn: Callable[..., torch.Tensor], batches: Iterator[Any],
    parameters: torch.Tensor,
) -> tuple[torch.Tensor, float]:  # fmt: skip
    """The gradient at `parameters` of the mean loss on this worker's part of the next batch, and
    the sum of the losses."""
    inputs, targets, samples_per_worker = next(batches)
    params = list(model.parameters())
    with torch.no_grad():
        for param, part in zip(params, unflatten(parameters, params), strict=True):
            param.copy_(part)
    model.zero_grad()
    loss = loss_fn(model(inputs), targets, reduction="sum")
    (loss / samples_per_worker).backward()
    return flatten([param.grad for param in params]), loss.item()


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements as one vector, on the CPU: remote calls carry no others."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()


def unflatten(vector: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`vector` in parts of the shapes of `like`."""
    parts = vector.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def batches_of_shard(data: Any, batch_size: int, workers: Any) -> Iterator[Any]:
    """This worker's shard of each global batch, without end: (inputs, targets, samples per worker).
    `batch_size` divides the number of samples."""
    train_set, _ = partition_dataset(data, batch_size, group=workers)
    while True:
        for inputs, targets in train_set:
            yield inputs, targets, batch_size / dist.get_world_size(workers)


def run(rank: int, size: int, mode: str) -> None:
    """Fit a linear model: rank 0 serves, the other ranks work. The server prints what it has."""
    torch.manual_seed(1234)
    inputs = torch.randn(240, 3)
    data = TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [3.0]]) + 0.5)
    model = nn.Linear(3, 1)
    workers = dist.new_group(list(range(1, size)))
    with Agent() as agent:
        if rank == SERVER:
            server = ParameterServer(model, mode, size - 1, steps=100)
            serve(agent, server)
            found = [round(value, 3) for value in flatten(server.params).tolist()]
            print(f"{mode}: {sum(server.taken)} gradients, {server.version} steps, {found}")
        else:
            batches = batches_of_shard(data, 24, workers)
            work(agent, rank - 1, partial(compute_gradient, model, F.mse_loss, batches))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for mode in ("sync", "async", "stale-synchronous"):
        run(dist.get_rank(), dist.get_world_size(), mode)
    dist.destroy_process_group()
