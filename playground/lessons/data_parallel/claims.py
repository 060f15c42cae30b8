"""Two sentences about DataParallel that are often read and are not so, put to the test.

    python -m playground data-parallel

"Two models sit on the first GPU": the replica there is made of the model's own memory. "The replicas differ, so
training does not go well": every forward makes them anew, of the one model, which gets the sum of their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import nn

from playground.lessons.data_parallel.criterion import LossModel, weighted_mean
from playground.lessons.data_parallel.devices import resolve_devices
from playground.lessons.data_parallel.gather import gather
from playground.lessons.data_parallel.language import TokenLoss, new_model_and_batch, new_optimizer
from playground.lessons.data_parallel.memory import track_memory
from playground.lessons.data_parallel.parallel_apply import parallel_apply
from playground.lessons.data_parallel.replicate import replicate
from playground.lessons.data_parallel.results import Claims, ModelCopy, ReplicaStep
from playground.lessons.data_parallel.scatter import scatter
from playground.lessons.data_parallel.settings import DataParallelSettings


def claims(rank: int, size: int, settings: DataParallelSettings) -> Claims:
    """Two sentences put to the test: "two models sit on the first device" and "the replicas differ, so training does
    not go well"."""
    devices = resolve_devices(settings.devices)
    return Claims(copies=count_models(settings, devices), steps=compare_replicas(settings, devices))


def count_models(settings: DataParallelSettings, devices: list[torch.device]) -> list[ModelCopy]:
    """How many bytes of parameters each device holds once there are replicas, and what of them the replicas share."""
    model, _, _ = new_model_and_batch(1, settings.seed, devices[0])
    with track_memory(devices) as account:
        account.put_module(model, devices[0])
        replicas = replicate(model, devices)
        held = account.held_by_label
    own = {parameter.data_ptr() for parameter in model.parameters()}
    return [
        ModelCopy(
            device=str(device), parameters=held[device]["parameters"], of=len(own),
            shared=sum(tensor.data_ptr() in own for tensor in parameters_of(replica, model)),
        )
        for device, replica in zip(devices, replicas, strict=True)
    ]  # fmt: skip


def compare_replicas(settings: DataParallelSettings, devices: list[torch.device]) -> list[ReplicaStep]:
    """Steps of DataParallel with two samples per device, and as many on one device with all of them, in float64."""
    models = [LossModel(new_model_and_batch(1, settings.seed, devices[0])[0], TokenLoss()).double() for _ in range(2)]
    optimizers = [new_optimizer(model, settings.optimizer) for model in models]
    _, *batch = new_model_and_batch(2 * len(devices), settings.seed, devices[0])
    return [compare_step(step, models, optimizers, batch, devices) for step in range(1, settings.steps + 1)]


def compare_step(
    step: int,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Sequence[torch.Tensor],
    devices: list[torch.device],
) -> ReplicaStep:
    """One step of the first model on all devices, and of the second on the first device alone."""
    parallel, alone = models
    chunks = scatter(tuple(batch), devices)
    used = devices[: len(chunks)]
    replicas = replicate(parallel, used)
    first, *others = (parameters_of(replica, parallel) for replica in replicas)
    for parameter in chain(first, *others):
        parameter.retain_grad()
    replicas_differ = max((largest_difference(first, other) for other in others), default=0.0)
    losses = gather(parallel_apply(replicas, chunks, None, used), devices[0])
    together = weighted_mean(losses, [len(tokens) for tokens, _ in chunks])
    for optimizer, loss in zip(
        optimizers, (together, alone(*(tensor.to(devices[0]) for tensor in batch))), strict=True
    ):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    gradients = [[parameter.grad for parameter in replica] for replica in (first, *others)]
    return ReplicaStep(
        step=step, loss=together.item(), replicas_differ=replicas_differ,
        gradients_differ=max((largest_difference(gradients[0], other) for other in gradients[1:]), default=0.0),
        from_one_device=largest_difference(list(parallel.parameters()), list(alone.parameters())),
    )  # fmt: skip


def parameters_of(replica: nn.Module, model: nn.Module) -> list[torch.Tensor]:
    """A replica's parameters, in the order of the model's. They are no leaves: `parameters()` has none of them."""
    return [attrgetter(name)(replica) for name, _ in model.named_parameters()]


def largest_difference(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Between two numbers in the same place, wherever the tensors lie."""
    pairs = zip(tensors, others, strict=True)
    return max((tensor.detach().cpu() - other.detach().cpu()).abs().max().item() for tensor, other in pairs)
