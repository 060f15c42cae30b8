"""The lesson's run: on each grid a training, beside one process's, with its messages counted by axis."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch.distributed as dist
from torch import Tensor, nn

from playground.lessons.mesh import costs
from playground.lessons.mesh.lesson import GPTStage, Mesh, layers_of
from playground.lessons.mesh.page import MeshSettings
from playground.lessons.pipeline.experiment import warm_up
from playground.lessons.tensor.experiment import part_like
from playground.measurement import Fields
from playground.runtime import device, report, synchronize
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.runtime.tap import Call, Observer, observing, ranks_of
from playground.training.gpt import LR, copying, copying_loss, new_model
from playground.training.gpt_config import GPTConfig
from playground.training.gpt_run import parameter_difference
from playground.training.replicas import broadcast_parameters
from playground.training.traffic import Traffic

CONFIG = GPTConfig(costs.LAYERS, costs.WIDTH, costs.HEADS, costs.LENGTH, costs.VOCABULARY)
Step = Callable[[Tensor, Tensor], float]
"""From a batch's tokens and targets [batch, length]: computes gradients, and returns the loss."""


def run(rank: int, size: int, settings: MeshSettings) -> list[Fields]:
    """For each grid what this rank has found."""
    require_same_on_all_ranks(vars(settings))
    oracle, losses = new_gpt(settings), [0.0] * settings.steps
    if rank == 0:
        losses, _ = train(oracle, partial(step_alone, oracle), settings)
    expected = torch.tensor(losses, dtype=torch.float64, device=device())
    dist.broadcast(expected, 0)
    broadcast_parameters(oracle)
    return [train_on(shape, oracle, expected, settings) for shape in settings.shapes]


def new_gpt(settings: MeshSettings) -> nn.Sequential:
    return new_model(CONFIG, settings.seed).to(device(), torch.float64)


def step_alone(model: nn.Sequential, tokens: Tensor, targets: Tensor) -> float:
    loss = copying_loss(model(tokens), targets)
    loss.backward()
    return loss.item()


def train(model: nn.Module, step: Step, settings: MeshSettings) -> tuple[list[float], float]:
    """Train on whole batches, the same on every rank. Returns the losses, and the seconds of a step."""
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=LR), torch.Generator().manual_seed(settings.seed)
    losses, seconds = list[float](), list[float]()
    for _ in range(settings.steps):
        batch = [each.to(device()) for each in copying(costs.BATCH, generator)]
        start = time.perf_counter()
        optimizer.zero_grad()
        losses.append(step(*batch))
        optimizer.step()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return losses, median(seconds[1:] or seconds)


def train_on(shape: costs.Shape, oracle: nn.Sequential, expected: Tensor, settings: MeshSettings) -> Fields:
    """On a grid: this rank's place, and what it exchanges in a step; the largest differences from one process."""
    report(phase=f"training on {costs.name_of(shape)}")
    mesh = Mesh(shape)
    stage, traffic = GPTStage(new_gpt(settings), mesh), AxisTraffic(mesh)
    batch = (mesh.part_of(each.to(device())) for each in copying(costs.BATCH, torch.Generator()))
    tokens, targets = (each.chunk(costs.MICROBATCHES) for each in batch)
    hidden = [expected.new_ones(*each.shape, costs.WIDTH).requires_grad_() for each in tokens]
    warm_up(stage, tokens if mesh.pp.is_first else hidden, targets)
    with observing(traffic):
        losses, seconds = train(stage.model, partial(stage.step, microbatches=costs.MICROBATCHES), settings)
    by_loss = (expected - expected.new_tensor(losses)).abs().max() if mesh.pp.is_last else 0.0
    by_parameter = parameter_difference(layers_of(oracle, mesh.pp), stage.model, partial(part_like, stage.ranks))
    largest = expected.new_tensor([by_loss, by_parameter])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    found = {"place": mesh.place, "first": losses[0], "last": losses[-1], "step_seconds": seconds}
    found["groups"] = traffic.by_axis(settings.steps, costs.bytes_sent(shape, mesh.pp.stage))
    return found | dict(zip(("loss_difference", "parameter_difference"), largest.tolist(), strict=True))


class AxisTraffic(Observer):
    """Counts this rank's calls, and the bytes that it sends in them, by axis of the mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.axes = {group: axis for axis, group in mesh.groups.items()}
        self.ranks = {axis: [*ranks_of(group)] for axis, group in mesh.groups.items()} | {"pp": [*mesh.pp.row]}
        self.traffic = {axis: Traffic() for axis in self.ranks}

    def begun(self, call: Call) -> None:
        if call.name != "irecv":
            self.traffic[self.axes.get(call.group, "pp")].begun(call)

    def by_axis(self, steps: int, forms: dict[str, float]) -> dict[str, Fields]:
        """For each axis of several ranks: the group, what this rank calls and sends in a step, and the closed form."""
        found = {}
        for axis, ranks in self.ranks.items():
            if len(ranks) > 1:
                calls = {name: count // steps for name, count in self.traffic[axis].calls.items()}
                sent = self.traffic[axis].sent / steps
                found[axis] = {"ranks": ranks, "calls": calls, "sent": sent, "form": forms[axis]}
        return found
