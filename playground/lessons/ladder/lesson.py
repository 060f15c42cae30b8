"""From average_gradients to DistributedDataParallel: fewer messages, and messages sent earlier.

    time of a step = computing + the part of averaging that is not hidden

Averaging takes less time in fewer messages: flat and bucketed. It is hidden if it begins while
backward is still computing: overlapped. overlapped_buckets does both, gradients_as_views also saves
the copies, and ddp is PyTorch's version, DistributedDataParallel. Each of these functions takes a
model, and returns the model to call and the functions to call after backward.

    python -m playground ladder --link 1
    torchrun --nproc-per-node 2 lesson.py

    one process           40.8 ms a step, 2 x 256 samples
    per_parameter         83.3 ms a step, largest difference 3e-10
    flat                  47.1 ms a step, largest difference 3e-10
    overlapped            66.7 ms a step, largest difference 3e-10
    bucketed              48.9 ms a step, largest difference 3e-10
    overlapped_buckets    38.9 ms a step, largest difference 3e-10
    gradients_as_views    33.5 ms a step, largest difference 3e-10
    ddp                   32.3 ms a step, largest difference 3e-10
    no_averaging          21.9 ms a step, largest difference 3e+00

3e-10 is rounding after ten steps. no_averaging is wrong on purpose: its time is the time of
computing, and its difference is what a mistake looks like.
Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704, section 3.2
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

STEPS = 10
BATCH_SIZE = 256  # samples of each rank
WIDTH = 128  # numbers that enter and leave a layer
BUCKET_MB = 0.5  # MiB of gradients that fill a bucket


def per_parameter(model):
    """After backward, an all_reduce for each parameter: the average_gradients of sgd."""

    def average():
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()

    return model, [average]


def flat(model):
    """After backward, one all_reduce for all gradients: the message."""

    def average():
        grads = [param.grad for param in model.parameters()]
        message = parameters_to_vector(grads) / dist.get_world_size()  # the gradients, in one row
        dist.all_reduce(message)
        vector_to_parameters(message, grads)

    return model, [average]


def overlapped(model):
    """During backward, an all_reduce for each parameter, as soon as its gradient is complete."""
    handles = []

    def start(param):
        param.grad /= dist.get_world_size()
        handles.append(dist.all_reduce(param.grad, async_op=True))

    def finish():
        while handles:
            handles.pop().wait()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(start)
    return model, [finish]


def bucketed(model):
    """After backward, an all_reduce for each bucket: the gradients of a few parameters."""
    buckets = [Bucket(params) for params in split_into_buckets(model)]
    return model, [call for bucket in buckets for call in (bucket.start, bucket.finish)]


def split_into_buckets(model):
    """Lists of parameters, the last layer first: backward computes its gradients first.

    A bucket takes parameters until it has at least BUCKET_MB.
    """
    buckets: list[list[nn.Parameter]] = [[]]
    for param in reversed(list(model.parameters())):
        if sum(other.nbytes for other in buckets[-1]) >= BUCKET_MB * 2**20:
            buckets.append([])
        buckets[-1].append(param)
    return buckets


class Bucket:
    """Parameters whose gradients travel in one message."""

    def __init__(self, params):
        self.params = params

    def start(self):
        self.grads = [param.grad for param in self.params]
        self.message = parameters_to_vector(self.grads) / dist.get_world_size()
        self.handle = dist.all_reduce(self.message, async_op=True)

    def finish(self):
        self.handle.wait()
        vector_to_parameters(self.message, self.grads)


def overlapped_buckets(model):
    """During backward, an all_reduce for each bucket, as soon as its gradients are complete."""
    buckets = [Bucket(params) for params in split_into_buckets(model)]
    for bucket in buckets:
        when_complete(bucket.params, bucket.start)
    return model, [bucket.finish for bucket in buckets]


def when_complete(params, action):
    """Call the action in each backward, as soon as all of the params have their gradients."""
    missing = set(params)

    def on_gradient(param):
        missing.remove(param)
        if not missing:
            missing.update(params)  # for the next backward
            action()

    for param in params:
        param.register_post_accumulate_grad_hook(on_gradient)


def gradients_as_views(model):
    """The same without copies: the gradients are views of their bucket's message."""
    buckets = [BucketOfViews(params) for params in split_into_buckets(model)]
    for bucket in buckets:
        when_complete(bucket.params, bucket.start)
    return model, [bucket.finish for bucket in buckets]


class BucketOfViews:
    """Parameters whose gradients share the memory of one message."""

    def __init__(self, params):
        self.params = params
        sizes = [param.numel() for param in params]
        self.message = params[0].new_zeros(sum(sizes))
        for param, piece in zip(params, self.message.split(sizes), strict=True):
            param.grad = piece.view_as(param)  # backward adds to it: it writes into the message

    def start(self):
        self.message /= dist.get_world_size()
        self.handle = dist.all_reduce(self.message, async_op=True)

    def finish(self):
        self.handle.wait()


def ddp(model):
    """PyTorch's averaging, which backward also waits for. Forward must call the wrapper."""
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True), []


def no_averaging(model):
    """Every rank trains on its own inputs only."""
    return model, []


def train(rung, inputs):
    """Train a model on inputs [steps, samples, width].

    Return its parameters, and the time of the fastest step in milliseconds.
    """
    torch.manual_seed(1234)  # the same initial parameters for every rung, on every rank
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(16)
    ]
    model, after_backward = rung(nn.Sequential(*blocks).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    times = []
    for batch in inputs:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)  # None would drop the views of gradients_as_views
        model(batch).square().sum(1).mean().backward()  # any loss will do
        for call in after_backward:
            call()
        optimizer.step()
        times.append(1000 * (time.perf_counter() - start))
    return parameters_to_vector(model.parameters()).detach(), min(times)


def run(rank, size):
    torch.manual_seed(0)
    # The inputs of all ranks, the same on each. In float64, rounding cannot hide an error.
    whole = torch.randn(STEPS, size * BATCH_SIZE, WIDTH, dtype=torch.float64)
    expected, milliseconds = train(no_averaging, whole)  # each rank does the work of one process
    if rank == 0:
        print(f"one process{milliseconds:15.1f} ms a step, {size} x {BATCH_SIZE} samples")
    differences = {}
    for rung in (
        per_parameter,
        flat,
        overlapped,
        bucketed,
        overlapped_buckets,
        gradients_as_views,
        ddp,
        no_averaging,
    ):
        params, milliseconds = train(rung, whole.chunk(size, dim=1)[rank])
        difference = (params - expected).abs().max()
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(
                f"{rung.__name__:20}{milliseconds:6.1f} ms a step, "
                f"largest difference {difference:.0e}"
            )
        differences[rung] = difference
    wrong = [  # rounding grows with the steps, but stays far below what a mistake does
        rung.__name__
        for rung, difference in differences.items()
        if rung is not no_averaging and not difference <= differences[no_averaging] / 100
    ]
    assert not wrong, f"not the training of one process: {', '.join(wrong)}"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
