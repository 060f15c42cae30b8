"""Remote calls: a function runs on another rank, and its result comes back.

    torchrun --nproc-per-node 3 lesson.py
    python -m playground rpc
    python -m playground rpc -n 4 --only distributed_autograd

So far all ranks ran the same program, and each message had its counterpart. Here a rank calls a
function on another rank, whose program does nothing to serve it: a thread there listens. `call` is
what torch.distributed.rpc (in maintenance mode) names `rpc_sync`, `remote` returns what it names an
`RRef`. The tables show the run with as many ranks as they have rows.
Source: https://docs.pytorch.org/docs/stable/rpc.html
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import rpc

REQUEST = 0  # tag of requests
REPLY = 2**30  # plus the number of the call: tag of its reply
STOP = 0  # number of a request that ends the thread which receives it
NO_LIMIT = timedelta(days=1000)  # a receive that times out breaks the connection
Function = Callable[..., Any]
agents: list[Any] = []  # of this process: functions that run for others find it here


class Agent:
    """This rank's end of all remote calls: `with Agent() as agent:`, on all ranks together."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.others = [rank for rank in range(dist.get_world_size()) if rank != self.rank]
        # A group of its own: no other message can be taken for a request.
        self.group = dist.new_group(timeout=NO_LIMIT, backend="gloo")
        self.numbers = itertools.count(STOP + 1)  # of calls, and of objects
        self.objects: dict[int, Any] = {}  # kept here for other ranks, by number
        self.dropped = {rank: set[int]() for rank in self.others}  # theirs, of no use here now
        self.threads: list[threading.Thread] = []  # those that receive requests

    def __enter__(self) -> Self:
        agents.append(self)
        self.threads += [start_thread(self.serve, rank) for rank in self.others]
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        """Wait until no rank makes calls any more, and end the threads."""
        if not failure:
            self.barrier()
            for rank in self.others:
                self.send(rank, REQUEST, STOP, None)
            for thread in self.threads:
                thread.join()
        agents.remove(self)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        dist.barrier(self.group)

    def call(self, rank: int, function: Function, *args: Any) -> Any:
        """Run `function(*args)` on that other rank, and return a copy of its result.

        Raises `RuntimeError` if the function raises, caused by one with the traceback from there,
        and `ValueError` if there is no such other rank.
        """
        if rank not in self.others:
            raise ValueError(f"a remote call to rank {rank}: the other ranks are {self.others}")
        number = next(self.numbers)
        dropped = list(self.dropped[rank])
        self.send(rank, REQUEST, number, (function, args, dropped))
        self.dropped[rank].difference_update(dropped)
        result, error, told = pickle.loads(self.receive(rank, REPLY + number)[1])
        if error:
            raise RuntimeError(error) from RuntimeError(f"\n{told}")
        return result

    def serve(self, caller: int) -> None:
        """The body of a thread: receive the requests of a rank. Each is answered in a thread of its
        own: a function may make calls, whose functions call back."""
        answering: list[threading.Thread] = []
        while True:
            try:
                number, request = self.receive(caller, REQUEST)
            except RuntimeError:  # the caller is lost
                return
            if number == STOP:
                break
            answering = [thread for thread in answering if thread.is_alive()]
            answering.append(start_thread(self.answer, caller, number, request))
        for thread in answering:
            thread.join()

    def answer(self, caller: int, number: int, request: bytes) -> None:
        """Run a request, and reply with (result, error, traceback)."""
        try:
            function, args, dropped = pickle.loads(request)
            for each in dropped:
                self.objects.pop(each, None)
            self.send(caller, REPLY + number, number, (function(*args), None, None))
        except BaseException as error:  # whatever it is, the caller waits for a reply
            reply = None, f"{type(error).__name__}: {error}", traceback.format_exc().rstrip()
            with contextlib.suppress(RuntimeError):  # the caller is lost
                self.send(caller, REPLY + number, number, reply)

    def send(self, rank: int, tag: int, number: int, obj: object) -> None:
        """Send a header, which says how many bytes follow, and then those of the pickle."""
        body = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        header = torch.tensor([number, len(body)], device="cpu")
        dist.send(header, rank, self.group, tag)
        dist.send(body, rank, self.group, tag or number)  # another request may come between

    def receive(self, rank: int, tag: int) -> tuple[int, bytes]:
        """The number of a call, and the pickle."""
        header = torch.empty(2, dtype=torch.int64, device="cpu")
        dist.recv(header, rank, self.group, tag)
        number, size = header.tolist()
        body = torch.empty(size, dtype=torch.uint8, device="cpu")
        dist.recv(body, rank, self.group, tag or number)
        return number, body.numpy().tobytes()

    def remote(self, rank: int, function: Function, *args: Any) -> RemoteReference:
        """Run `function(*args)` on that rank, and keep the result there. Returns a reference."""
        return RemoteReference(self, rank, self.call(rank, keep, function, args))


def start_thread(function: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


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


class RemoteReference:
    """A reference to an object that stays with its owner as long as the reference exists. It cannot
    be sent to another rank: the owner would have to count."""

    def __init__(self, agent: Agent, owner: int, number: int) -> None:
        self.agent = agent
        self.owner = owner
        self.number = number

    def __del__(self) -> None:  # in the middle of anything: the owner is told with the next call
        self.agent.dropped[self.owner].add(self.number)

    def to_here(self) -> Any:
        """A copy of the object."""
        return self.agent.call(self.owner, kept, self.number)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object, where it is. Returns its result."""
        return self.agent.call(self.owner, call_method, self.number, method, args)


def keep(function: Function, args: tuple[Any, ...]) -> int:
    number = next(agents[-1].numbers)
    agents[-1].objects[number] = function(*args)
    return number


def kept(number: int) -> Any:
    return agents[-1].objects[number]


def call_method(number: int, method: str, args: tuple[Any, ...]) -> Any:
    return getattr(kept(number), method)(*args)


def remote_reference(rank: int, size: int) -> dict[str, object]:
    """A list stays with its owner, the right neighbour; this rank appends to it and reads it by a
    reference.

    `held`: how many objects the owner keeps for others; `left`: once the reference is gone.

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
        after = reference.to_here()
        held = agent.call(right, count_objects)
        del reference
        left = agent.call(right, count_objects)
    return {"owner": right, "after": after, "held": held, "left": left}


def count_objects() -> int:
    return len(agents[-1].objects)


class RemoteGraph:
    """The part of a graph that a remote call computes, on the rank that computes it."""

    def __init__(self, function: Function, inputs: tuple[torch.Tensor, ...]) -> None:
        self.inputs = [tensor.detach() for tensor in inputs]  # one that is passed twice is two
        for tensor in self.inputs:
            tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        with torch.enable_grad():
            self.output = function(*self.inputs)

    def value(self) -> torch.Tensor:
        return self.output.detach()

    def backward(self, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Add the gradients of this rank's parameters to their `.grad`; return the inputs'."""
        for tensor in self.inputs:
            tensor.grad = None
        self.output.backward(gradient, retain_graph=True)  # the caller may ask again
        return [tensor.grad for tensor in self.inputs]


class RemoteCall(torch.autograd.Function):
    """The caller's part: forward sends the inputs to the other rank, and backward the gradient."""

    @staticmethod
    def forward(ctx: Any, agent: Agent, rank: int, function: Function, *inputs: Any) -> Any:
        ctx.graph = agent.remote(rank, RemoteGraph, function, inputs[1:])
        return ctx.graph.call("value")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, None, *ctx.graph.call("backward", gradient)


def apply_remotely(agent: Agent, rank: int, function: Function, *inputs: Any) -> torch.Tensor:
    """Run `function(*inputs)` on that rank. Returns its tensor, in a graph that spans both."""
    # Whether or not an input needs a gradient: the other rank's parameters do.
    always = torch.empty(0, requires_grad=True, device="cpu")
    return RemoteCall.apply(agent, rank, function, always, *inputs)


def distributed_autograd(rank: int, size: int) -> dict[str, object]:
    """Forward on two ranks, backward across them: the loss is a weight of this rank times one of
    its right neighbour.

    The gradient of each weight is the other weight.

    | rank | here | there | loss | gradient_here | gradient_there |
    |------|------|-------|------|---------------|----------------|
    | 0    | 2.0  | 11.0  | 22.0 | 11.0          | 2.0            |
    | 1    | 3.0  | 12.0  | 36.0 | 12.0          | 3.0            |
    | 2    | 4.0  | 10.0  | 40.0 | 10.0          | 4.0            |
    """
    right = (rank + 1) % size
    here = torch.tensor(rank + 2.0, requires_grad=True, device="cpu")
    weights[:] = [torch.tensor(rank + 10.0, requires_grad=True, device="cpu")]
    with Agent() as agent:
        loss = apply_remotely(agent, right, multiply, here)
        loss.backward()
        there, gradient_there = agent.call(right, weight_and_gradient)
    values = {"here": here.item(), "there": there, "loss": loss.item()}
    return {**values, "gradient_here": here.grad.item(), "gradient_there": gradient_there}


weights: list[torch.Tensor] = []  # this rank's, for others to use


def multiply(factor: torch.Tensor) -> torch.Tensor:
    return factor * weights[0]


def weight_and_gradient() -> tuple[float, float]:
    return weights[0].item(), weights[0].grad.item()


def call_by_torch(number: torch.Tensor) -> torch.Tensor:
    """`remote_call` by torch.distributed.rpc, which torch does not have on Windows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about how torch calls its own functions
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size)
    after = rpc.rpc_sync(f"rank{(rank + 1) % size}", add_ten_times_the_rank, (number,))
    rpc.shutdown()
    return after


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in (remote_call, remote_reference, distributed_autograd):
        for name, value in step(rank, size).items():
            print(f"Rank {rank}, {step.__name__}: {name} {value}")
    if rpc.is_available():
        print(f"Rank {rank}, rpc_sync: {call_by_torch(torch.tensor(float(rank))).item()}")
    dist.destroy_process_group()
