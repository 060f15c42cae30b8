"""Remote calls: a function runs on another rank, and its result comes back.

    python -m playground rpc
    python -m playground rpc -n 4 --only distributed_autograd

So far all ranks ran the same program, and each message had its counterpart. Here a rank asks, and another one answers
without having planned to: a thread of it listens. This is our own agent, playground/remote/, over send and recv: `call`
is what torch.distributed.rpc (in maintenance mode) names `rpc_sync`, `remote` gives what it names an `RRef`.
Tensors in remote calls are CPU tensors. The tables show the run with as many ranks as they have rows.
Source: https://docs.pytorch.org/docs/stable/rpc.html
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from playground.remote.agent import Agent, current_agent
from playground.remote.autograd import apply_remotely

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
    number = torch.tensor(float(rank), device="cpu")
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
    weights[:] = [torch.tensor(rank + 10.0, requires_grad=True, device="cpu")]
    return torch.tensor(rank + 2.0, requires_grad=True, device="cpu")


def multiply(factor: torch.Tensor) -> torch.Tensor:
    return factor * weights[0]


def weight() -> torch.Tensor:
    return weights[0].detach()


def gradient() -> torch.Tensor:
    """Ours is added to `.grad`, as by any backward pass."""
    return weights[0].grad


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
