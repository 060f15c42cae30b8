"""The lesson's run: on each grid a training, beside one process's, with its messages counted by axis; and what DTensor
calls when a placement changes."""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from playground.lessons.mesh import page
from playground.lessons.mesh.lesson import GPTStage, Mesh, Shape, layers_of
from playground.lessons.mesh.library import cut_all
from playground.lessons.tensor.experiment import parameter_difference, sent_by
from playground.measurement import Fields
from playground.runtime import device, report, synchronize
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.runtime.tap import Call, Observer, observing, ranks_of
from playground.training.gpt import LR, GPTConfig, copying, copying_loss, new_model
from playground.training.replicas import broadcast_parameters

CONFIG = GPTConfig(page.LAYERS, page.WIDTH, page.HEADS, page.LENGTH, page.VOCABULARY)
Step = Callable[[Tensor, Tensor], float]
"""From a batch's tokens and targets [batch, length]: computes gradients, and returns the loss."""


def run(rank: int, size: int, settings: page.MeshSettings) -> Fields:
    """On this rank: what DTensor has called, by change of placement; and for each grid what was found."""
    require_same_on_all_ranks(vars(settings))
    oracle, expected = new_gpt(settings), torch.zeros(settings.steps, dtype=torch.float64, device=device())
    if rank == 0:
        expected.copy_(torch.tensor(train(oracle, lambda *batch: step_alone(oracle, *batch), settings)[0]))
    dist.broadcast(expected, 0)
    broadcast_parameters(oracle)
    grids = [train_on(shape, oracle, expected, settings) for shape in settings.shapes]
    return {"placements": change_placements(), "grids": grids}


def new_gpt(settings: page.MeshSettings) -> nn.Sequential:
    return new_model(CONFIG, settings.seed).to(device(), torch.float64)


def step_alone(model: nn.Sequential, tokens: Tensor, targets: Tensor) -> float:
    loss = copying_loss(model(tokens), targets)
    loss.backward()
    return loss.item()


def train(model: nn.Module, step: Step, settings: page.MeshSettings) -> tuple[list[float], float]:
    """Train on whole batches, the same on every rank. Returns the losses, and the seconds of a step."""
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=LR), torch.Generator().manual_seed(settings.seed)
    losses, seconds = list[float](), list[float]()
    for _ in range(settings.steps):
        batch = [each.to(device()) for each in copying(page.BATCH, generator)]
        start = time.perf_counter()
        optimizer.zero_grad()
        losses.append(step(*batch))
        optimizer.step()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return losses, median(seconds[1:] or seconds)


def train_on(shape: Shape, oracle: nn.Sequential, expected: Tensor, settings: page.MeshSettings) -> Fields:
    """On a grid: this rank's place, and what it exchanges; seconds of a step; differences from one process, the largest
    of all ranks."""
    report(phase=f"training on {page.name_of(shape)}")
    mesh = Mesh(shape)
    stage, traffic = GPTStage(new_gpt(settings), mesh), AxisTraffic(mesh)
    with observing(traffic):
        losses, seconds = train(stage.model, lambda *batch: stage.step(*batch, page.MICROBATCHES), settings)
    found = {"place": mesh.place, "losses": losses, "step_seconds": seconds}
    found["groups"] = traffic.by_axis(settings.steps, page.sent(shape, mesh.pp.stage))
    own = layers_of(oracle, mesh.pp.stage, mesh.pp.stages)
    differences = {"parameter_difference": parameter_difference(own, stage.model, stage.ranks)}
    trained = {"loss_difference": losses}
    if settings.library:
        schedule, model = cut_all(new_gpt(settings), shape, stage.loss_part, page.MICROBATCHES)
        step = lambda *batch: step_by_library(schedule, stage, *batch)
        trained["library_difference"], found["library_seconds"] = train(model, step, settings)
    for name, each in trained.items():
        apart = (expected - torch.tensor(each, device=device())).abs().max().item()
        differences[name] = apart if mesh.pp.is_last else 0.0
    largest = torch.tensor([*differences.values()], dtype=torch.float64, device=device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return found | dict(zip(differences, largest.tolist(), strict=True))
