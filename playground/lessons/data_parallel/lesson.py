"""DataParallel by its parts: one process drives all devices, with a thread for each.

    python lesson.py
    python -m playground data-parallel
    python -m playground data-parallel --devices cpu:0,cpu:1 --gather logits

A forward pass is four calls:

    chunks = scatter(inputs, devices)
    replicas = replicate(module, devices)
    outputs = parallel_apply(replicas, chunks)
    output = gather(outputs, devices[0])

The devices are all GPUs, if there are two or more. Else four threads share the CPU, and where a GPU
would get a copy, there is nothing to do. Source:
https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html and
https://docs.pytorch.org/tutorials/beginner/blitz/data_parallel_tutorial.html
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn


def chunk_sizes(samples: int, devices: int) -> list[int]:
    """How many samples each device gets: all the same, the last one what is left. Of too few for
    all devices, the last devices get none.

    >>> chunk_sizes(30, 3), chunk_sizes(10, 4), chunk_sizes(5, 4), chunk_sizes(0, 4)
    ([10, 10, 10], [3, 3, 3, 1], [2, 2, 1], [0])
    """
    most = math.ceil(samples / devices)
    return [min(most, samples - start) for start in range(0, samples, most or 1)] or [0]


def scatter(inputs: Tensor, devices: Sequence[Any], dim: int = 0, to: Any = Tensor.to) -> list[Any]:
    """The chunks of `inputs` along `dim`, one on each device that gets one."""
    chunks = inputs.split(chunk_sizes(inputs.shape[dim], len(devices)), dim)
    return [to(chunk, device) for chunk, device in zip(chunks, devices, strict=False)]


def replicate(module: nn.Module, devices: Sequence[Any], to: Any = Tensor.to) -> list[nn.Module]:
    """A replica of `module` on each device, for one forward pass.

    Its parameters are copies that autograd has recorded: backward adds up their gradients in the
    module's own. On the device where the module lies nothing is copied, so what this replica
    changes in its buffers (the running statistics of BatchNorm) stays. Others' changes are lost.
    """
    copies: dict[Any, list[Any]] = {None: [None] * len(devices)}
    for tensor in (*module.parameters(), *module.buffers()):
        copies[tensor] = [to(tensor, device) for device in devices]
    for each in module.modules():  # its class and attributes, still without parameters
        copies[each] = [each._replicate_for_data_parallel() for _ in devices]
    for each in module.modules():
        for name, part in {**each._modules, **each._parameters, **each._buffers}.items():
            for replica, copy in zip(copies[each], copies[part], strict=True):
                setattr(replica, name, copy)
    return copies[module]


def parallel_apply(
    replicas: Sequence[Any], inputs: Sequence[Any], threads: Any = ThreadPoolExecutor
) -> list[Tensor]:
    """The output of each replica for its input (the elements of a tuple are its arguments), all at
    once, each in a thread. When all are done, raises the error of the first that failed."""
    grad = torch.is_grad_enabled()  # each thread has a mode of its own

    def apply(replica: Any, chunk: Any) -> Tensor:
        with torch.set_grad_enabled(grad):
            return replica(*chunk) if isinstance(chunk, tuple) else replica(chunk)

    with threads(len(replicas)) as pool:
        running = [pool.submit(apply, *pair) for pair in zip(replicas, inputs, strict=True)]
    return [future.result() for future in running]


def join(parts: Sequence[Tensor], device: Any, dim: int) -> Tensor:
    """These tensors, one after another along `dim`, on `device`."""
    return torch.cat([part.to(device) for part in parts], dim)


def gather(outputs: Sequence[Tensor], device: Any, dim: int = 0, join: Any = join) -> Tensor:
    """One output on `device`, of the outputs of all replicas: joined along `dim`. Numbers, as
    losses are, become a vector with one of each replica."""
    return join([each if each.dim() else each.view(1) for each in outputs], device, dim)


class DataParallel(nn.Module):
    """`module`, which lies on the first device, with each forward pass shared out over all."""

    def __init__(
        self, module: nn.Module, device_ids: Sequence[Any], output_device: Any = None, dim: int = 0
    ) -> None:
        super().__init__()
        self.module = module
        self.devices = list(device_ids)
        self.output_device = self.devices[0] if output_device is None else output_device
        self.dim = dim

    def forward(self, *inputs: Tensor) -> Tensor:
        cut = [scatter(each, self.devices, self.dim) for each in inputs]
        chunks = list(zip(*cut, strict=True))
        replicas = replicate(self.module, self.devices[: len(chunks)])
        outputs = parallel_apply(replicas, chunks)
        return gather(outputs, self.output_device, self.dim)


class ParallelLossModel(nn.Module):
    """A model and its criterion as one module: (*inputs, targets) → loss. In DataParallel each
    replica computes the loss of its chunk, and only these numbers are gathered."""

    def __init__(self, model: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, *inputs_and_targets: Any) -> Tensor:
        *inputs, targets = inputs_and_targets
        return self.criterion(self.model(*inputs), targets)


def weighted_mean(losses: Tensor, sizes: Sequence[int]) -> Tensor:
    """The mean over all samples, from the mean over each chunk [chunks] and the chunks' sizes.

    The mean of the means is the same only if all chunks are of one size: in another, each sample of
    a small chunk weighs more than one of a large chunk.
    """
    parts = zip(losses.reshape(-1), sizes, strict=True)
    return torch.stack([loss * (count / sum(sizes)) for loss, count in parts]).sum()


def print_ways(devices: Sequence[Any], samples: int = 10) -> None:
    """Train on one device and on several, by each way to the loss, and compare."""
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1000)).double().to(devices[0])
    inputs = torch.randn(samples, 8).double().to(devices[0])
    targets = torch.randint(1000, (samples,)).to(devices[0])
    criterion = nn.CrossEntropyLoss()
    sizes = chunk_sizes(samples, len(devices))
    print(f"{samples} samples on {len(devices)} devices: {sizes}")

    alone = criterion(model(inputs), targets)
    print(f"one device: loss {alone:.4f}")
    logits = DataParallel(model, devices)(inputs)
    print_way(f"{logits.numel()} logits gathered", criterion(logits, targets), alone, model)
    losses = DataParallel(ParallelLossModel(model, criterion), devices)(inputs, targets)
    print_way(f"{losses.numel()} losses gathered", weighted_mean(losses, sizes), alone, model)
    print_way("their plain mean", losses.mean(), alone, model)


def print_way(way: str, loss: Tensor, alone: Tensor, model: nn.Module) -> None:
    """Print a loss, and whether its gradients are those of the loss on one device."""
    params = list(model.parameters())
    grads = torch.autograd.grad(loss, params, retain_graph=True)
    expected = torch.autograd.grad(alone, params, retain_graph=True)
    are_same = all(map(torch.allclose, grads, expected))
    print(f"{way}: loss {loss:.4f}, {'the same' if are_same else 'other'} gradients")


if __name__ == "__main__":
    count = torch.cuda.device_count()
    gpus = [torch.device("cuda", index) for index in range(count)]
    print_ways(gpus if count > 1 else [torch.device("cpu")] * 4)
