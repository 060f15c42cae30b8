"""Remote procedure calls (RPC): a function runs on another rank, and its result comes back.

A call is two messages: a request, which is (function, arguments), and a reply, the result. On each
rank, one thread for each other rank waits for requests, so the program of the rank need not. The
result can also stay on the rank that computed it: the caller then has a reference to it. A part of
autograd's graph that stays on another rank lets backward cross ranks.

    python -m playground rpc
    torchrun --nproc-per-node 3 lesson.py

    Rank 0 by_hand: rank 1 returns 10, keeps [0, 10], difference 0e+00
    Rank 1 by_hand: rank 2 returns 21, keeps [1, 11], difference 0e+00
    Rank 2 by_hand: rank 0 returns 2, keeps [2, 12], difference 0e+00
    Rank 0 by_torch: rank 1 returns 10, keeps [0, 10], difference 0e+00
    …

Source: https://docs.pytorch.org/docs/stable/rpc.html
"""

import itertools
import threading
import warnings

import torch
import torch.distributed as dist
from torch.distributed import autograd as dist_autograd, rpc

objects = {}  # what this rank keeps for other ranks, by number
numbers = itertools.count()  # next(numbers) is 0, then 1, and so on


class Agent:
    """Makes the calls of this rank's program, and answers the calls of other ranks in threads."""

    def __init__(self, rank, size):
        self.others = [other for other in range(size) if other != rank]
        self.requests = dist.new_group(backend="gloo")  # only requests travel in this group
        self.replies = dist.new_group(backend="gloo")
        self.threads = [
            threading.Thread(target=self.serve, args=(other,), daemon=True)  # ends with the program
            for other in self.others
        ]
        for thread in self.threads:
            thread.start()

    def call(self, rank, function, *args):
        """Run function(*args) on that other rank. Return a copy of the result."""
        reply = [None]
        dist.send_object_list([(function, args)], dst=rank, group=self.requests)
        dist.recv_object_list(reply, src=rank, group=self.replies)
        if isinstance(reply[0], Exception):
            raise reply[0]
        return reply[0]

    def serve(self, caller):
        """Answer the requests of one rank, until it sends None."""
        request = [None]
        dist.recv_object_list(request, src=caller, group=self.requests)
        while request[0] is not None:
            function, args = request[0]
            try:
                result = function(*args)
            except Exception as error:  # the caller waits for a reply, whatever happens
                result = error
            dist.send_object_list([result], dst=caller, group=self.replies)
            dist.recv_object_list(request, src=caller, group=self.requests)

    def shut_down(self):
        """Tell all ranks that no more calls come from here. Answer until they have done so, too."""
        for rank in self.others:
            dist.send_object_list([None], dst=rank, group=self.requests)
        for thread in self.threads:
            thread.join()


class Reference:
    """A reference to the result of function(*args), which stays on the rank that computes it."""

    def __init__(self, agent, owner, function, *args):
        self.agent = agent
        self.owner = owner
        self.number = agent.call(owner, keep, function, args)

    def call(self, method, *args):
        """Call a method of the object on its owner. Return a copy of what the method returns."""
        return self.agent.call(self.owner, call_method, self.number, method, args)


def keep(function, args):
    number = next(numbers)
    objects[number] = function(*args)
    return number


def call_method(number, method, args):
    return getattr(objects[number], method)(*args)


class RemoteGraph:
    """The part of the graph that belongs to a layer. It stays on the layer's rank."""

    def __init__(self, layer_number, inputs):
        self.inputs = inputs.detach().requires_grad_()
        self.outputs = objects[layer_number].forward(self.inputs)

    def get_outputs(self):
        return self.outputs.detach()

    def backward(self, gradient):
        """Compute the gradients of the layer, and return the gradient of the inputs."""
        self.outputs.backward(gradient)
        return self.inputs.grad


class RemoteForward(torch.autograd.Function):
    """The caller's part of the graph: one operation. Its inputs and its gradient are sent."""

    @staticmethod
    def forward(ctx, layer, inputs):
        ctx.graph = Reference(layer.agent, layer.owner, RemoteGraph, layer.number, inputs)
        return ctx.graph.call("get_outputs")

    @staticmethod
    def backward(ctx, gradient):
        return None, ctx.graph.call("backward", gradient)  # of layer and of inputs


class Layer(torch.nn.Linear):
    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(4, 4, bias=False)

    def get_gradient(self):
        return self.weight.grad


def add_ten_times_rank(number):
    return number + 10 * dist.get_rank()


def by_hand(rank, right, size, inputs):
    """A call, a reference and a backward, from each rank to the rank on its right."""
    agent = Agent(rank, size)
    result = agent.call(right, add_ten_times_rank, rank)
    numbers_there = Reference(agent, right, list, [rank])
    numbers_there.call("append", rank + 10)
    kept = numbers_there.call("copy")
    layer = Reference(agent, right, Layer, rank)
    RemoteForward.apply(layer, inputs).square().sum().backward()
    gradients = inputs.grad, layer.call("get_gradient")
    agent.shut_down()
    return result, kept, gradients


def by_torch(rank, right, size, inputs):
    """The same with the library. An RRef is its reference; a context has a backward's gradients."""
    warnings.filterwarnings("ignore", "You are using a Backend")  # init_rpc itself uses it
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size)
    name = f"rank{right}"
    result = rpc.rpc_sync(name, add_ten_times_rank, args=(rank,))
    numbers_there = rpc.remote(name, list, args=([rank],))
    numbers_there.rpc_sync().append(rank + 10)
    kept = numbers_there.to_here()
    layer = rpc.remote(name, Layer, args=(rank,))
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [layer.rpc_sync().forward(inputs).square().sum()])
        gradient_there = rpc.rpc_async(name, get_gradient_in, args=(context, layer)).wait()
        gradients = dist_autograd.get_gradients(context)[inputs], gradient_there
    rpc.shutdown()
    return result, kept, gradients


def get_gradient_in(context, layer):
    return dist_autograd.get_gradients(context)[layer.local_value().weight]


def run(rank, size):
    assert size > 1, "a call needs at least 2 ranks"
    right = (rank + 1) % size
    inputs = torch.ones(2, 4) * (rank + 1)
    layer, inputs_here = Layer(rank), inputs.clone().requires_grad_()  # to compare with
    layer(inputs_here).square().sum().backward()
    for method in (by_hand, by_torch):
        result, kept, found = method(rank, right, size, inputs.clone().requires_grad_())
        pairs = zip(found, (inputs_here.grad, layer.weight.grad), strict=True)
        difference = max((gradient - expected).abs().max() for gradient, expected in pairs)
        print(
            f"Rank {rank} {method.__name__}: rank {right} returns {result}, keeps {kept}, "
            f"difference {difference:.0e}"
        )
        assert (result, kept) == (rank + 10 * right, [rank, rank + 10]), (
            "not what a call here gives"
        )
        assert difference < 1e-9, f"{method.__name__}: not the gradients of a layer that is here"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide an error
    torch.set_default_device("cpu")  # calls carry tensors of the CPU
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
