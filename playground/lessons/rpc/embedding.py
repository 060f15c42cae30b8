"""A model of which one part lives elsewhere: an embedding on rank 0, elsewhere a layer in DDP.

What is large and used a few rows at a time stays in one place; what is small and used whole is replicated. A trainer's
backward pass goes through the layer, whose gradients DistributedDataParallel averages, and on to rank 0.
Source: https://docs.pytorch.org/tutorials/advanced/rpc_ddp_tutorial.html
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.remote.agent import Agent
from playground.remote.autograd import apply_remotely
from playground.runtime import device

OWNER = 0
WORDS, WIDTH, CLASSES, SAMPLES = 10, 8, 2, 6
SEED = 1234
embeddings: list[nn.Embedding] = []
"""On the owner."""


def gradients_are_right(agent: Agent, trainers: Any) -> bool:
    """Whether, after a backward pass, the gradients of this rank's part are those of one process, to 1e-12.

    `trainers`: the group of all ranks but the owner's.
    """
    embedding, layer = new_parts()
    embeddings[:] = [embedding]
    dist.barrier()
    gradients = [] if agent.rank == OWNER else train(agent, layer.to(device()), trainers)
    dist.barrier()
    if agent.rank == OWNER:
        gradients = [embedding.weight.grad / (agent.size - 1)]
    pairs = zip(gradients, expected(agent.rank), strict=True)
    return all((ours - theirs).abs().max().item() <= 1e-12 for ours, theirs in pairs)


def train(agent: Agent, layer: nn.Module, trainers: Any) -> list[torch.Tensor]:
    """A trainer's backward pass. Returns the gradients of its layer."""
    words, labels = batch(dist.get_rank(trainers))
    model = DistributedDataParallel(layer, process_group=trainers)
    rows = apply_remotely(agent, OWNER, look_up, words)
    loss_of(model, rows, labels).backward()
    return [param.grad for param in layer.parameters()]


def look_up(words: torch.Tensor) -> torch.Tensor:
    return embeddings[0](words)


def new_parts() -> tuple[nn.Embedding, nn.Linear]:
    torch.manual_seed(SEED)
    return nn.Embedding(WORDS, WIDTH).double(), nn.Linear(WIDTH, CLASSES).double()


def batch(trainer: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(SEED + trainer)
    return torch.randint(WORDS, (SAMPLES,), generator=draw), torch.randint(CLASSES, (SAMPLES,), generator=draw)


def loss_of(layer: nn.Module, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(layer(rows.to(device())), labels.to(device()))


def expected(rank: int) -> list[torch.Tensor]:
    """The gradients of this rank's part where one process has the whole model and all samples."""
    count = dist.get_world_size() - 1
    embedding, layer = new_parts()
    layer.to(device())
    words, labels = map(torch.cat, zip(*map(batch, range(count)), strict=True))
    loss_of(layer, embedding(words), labels).backward()
    return [param.grad for param in (embedding if rank == OWNER else layer).parameters()]
