"""Remote calls: a function runs on another rank, and its result comes back.

    python -m playground rpc
    python -m playground rpc -n 4 --only distributed_autograd

So far all ranks ran the same program, and each message had its counterpart. Here a rank asks, and another one answers
without having planned to: a thread of it listens. This is our own agent, playground/remote/, over send and recv: `call`
is what torch.distributed.rpc (in maintenance mode) names `rpc_sync`, `remote` gives what it names an `RRef`.
Tensors in remote calls are CPU tensors. The tables show the run with as many ranks as they have rows.
Sources: https://docs.pytorch.org/docs/stable/rpc.html, and for `beside_ddp`
https://docs.pytorch.org/tutorials/advanced/rpc_ddp_tutorial.html
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.remote.agent import Agent, current_agent
from playground.remote.autograd import apply_remotely
from playground.runtime import device

weights: list[torch.Tensor] = []
"""This rank's weights, for others to use."""


def remote_call(rank: int, size: int) -> dict[str, float]:
    """Each rank has its right neighbour add ten times the neighbour's own rank to a number.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 0.0    | 10.0  |
    | 1    | 1.0    | 21.0  |
    | 2    | 2.0    | 2.0   |
    """
    number = torch.tensor(float(rank))
    with Agent() as agent:
        after = agent.call((rank + 1) % size, add_ten_times_the_rank, number)
    return {"before": number.item(), "after": after.item()}


def add_ten_times_the_rank(number: torch.Tensor) -> torch.Tensor:
    return number + 10 * dist.get_rank()


def remote_exception(rank: int, size: int) -> dict[str, str | None]:
    """An exception that is raised there is raised here, with the traceback from there. Only rank 1 knows the answer.

    | rank | answer                              | traceback_ends_in                   |
    |------|-------------------------------------|-------------------------------------|
    | 0    | "42"                                | None                                |
    | 1    | "LookupError: rank 2 does not know" | "LookupError: rank 2 does not know" |
    | 2    | "LookupError: rank 0 does not know" | "LookupError: rank 0 does not know" |
    """
    with Agent() as agent:
        try:
            return {"answer": agent.call((rank + 1) % size, answer_as_rank_1), "traceback_ends_in": None}
        except LookupError as error:
            told = str(error.__cause__).splitlines()
            return {"answer": f"LookupError: {error}", "traceback_ends_in": told[-1]}


def answer_as_rank_1() -> str:
    if dist.get_rank() != 1:
        raise LookupError(f"rank {dist.get_rank()} does not know")
    return "42"


def remote_reference(rank: int, size: int) -> dict[str, object]:
    """A list stays with its owner, the right neighbour; this rank appends to it and reads it by a reference.

    `held`: how many objects the owner keeps for others; `left`: how many, once the reference is gone.

    | rank | owner | after   | held | left |
    |------|-------|---------|------|------|
    | 0    | 1     | [0, 10] | 1    | 0    |
    | 1    | 2     | [1, 11] | 1    | 0    |
    | 2    | 0     | [2, 12] | 1    | 0    |
    """
    right = (rank + 1) % size
    with Agent() as agent:
        reference = agent.remote(right, list, [rank])
        reference.call("append", rank + 10)
        outcome = {"owner": reference.owner, "after": reference.to_here(), "held": agent.call(right, count_objects)}
        del reference
        return {**outcome, "left": agent.call(right, count_objects)}


def count_objects() -> int:
    return len(current_agent().objects)


def distributed_autograd(rank: int, size: int) -> dict[str, object]:
    """Forward on two ranks, backward across them: the loss is a weight of this rank times one of its right neighbour.

    The gradient of the weight here is the weight there, and that of the weight there is the weight here.

    | rank | here | there | loss | gradient_here | gradient_there |
    |------|------|-------|------|---------------|----------------|
    | 0    | 2.0  | 11.0  | 22.0 | 11.0          | 2.0            |
    | 1    | 3.0  | 12.0  | 36.0 | 12.0          | 3.0            |
    | 2    | 4.0  | 10.0  | 40.0 | 10.0          | 4.0            |
    """
    right, here = (rank + 1) % size, new_weights(rank)
    with Agent() as agent:
        loss = apply_remotely(agent, right, multiply, here)
        loss.backward()
        return {
            "here": here.item(),
            "there": agent.call(right, weight).item(),
            "loss": loss.item(),
            "gradient_here": here.grad.item(),
            "gradient_there": agent.call(right, gradient).item(),
        }


def new_weights(rank: int) -> torch.Tensor:
    """This rank's weight for itself. The one for its left neighbour is put into `weights`."""
    weights[:] = [torch.tensor(rank + 10.0, requires_grad=True)]
    return torch.tensor(rank + 2.0, requires_grad=True)


def multiply(factor: torch.Tensor) -> torch.Tensor:
    return factor * weights[0]


def weight() -> torch.Tensor:
    return weights[0].detach()


def gradient() -> torch.Tensor:
    """Ours is added to `.grad`, as by any backward pass."""
    return weights[0].grad


def beside_ddp(rank: int, size: int) -> dict[str, object]:
    """Rank 0 owns an embedding; the others train a layer on top of it with DistributedDataParallel.

    `as_one_process`: whether the gradients here equal those of one process with the whole model and all samples.

    | rank | role        | as_one_process |
    |------|-------------|----------------|
    | 0    | "embedding" | True           |
    | 1    | "trainer"   | True           |
    | 2    | "trainer"   | True           |
    """
    trainers = dist.new_group(list(range(1, size)))
    with Agent() as agent:
        right = gradients_are_right(agent, trainers)
    return {"role": "trainer" if rank else "embedding", "as_one_process": right}


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


if __name__ == "__main__":
    from playground.console.script import run_lesson

    run_lesson("rpc")
