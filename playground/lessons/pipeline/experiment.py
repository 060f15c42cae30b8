"""The schedules on a real model, on every rank: do they give one process's gradients, and what does each cost?"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.lessons.pipeline.activations import ActivationCounter
from playground.lessons.pipeline.grid import Grid, make_grid
from playground.lessons.pipeline.lesson import Stage
from playground.lessons.pipeline.model import cut, new_model
from playground.lessons.pipeline.results import StageRun
from playground.lessons.pipeline.schedules import SCHEDULES
from playground.lessons.pipeline.settings import BLOCKS, WARM_UP, WIDTH, PipelineSettings
from playground.runtime import device, report, synchronize
from playground.runtime.backends import backend_of
from playground.training.data import Batch, Images
from playground.training.replicas import flat

FEW = 4
"""Samples of a microbatch, where schedules are compared with one process."""


def run(rank: int, size: int, settings: PipelineSettings) -> list[StageRun]:
    """With each schedule: one batch in float64, compared with one process; then training in float32."""
    grid, model = make_grid(settings.data_parallel), new_model(BLOCKS, WIDTH, settings.seed).to(device())
    differences = compare(copy.deepcopy(model).double(), grid, settings)
    own = cut(model, grid.stage, grid.stages)
    warm_up(own, grid, settings, torch.float32)
    return [train(name, copy.deepcopy(own), grid, settings, differences[name]) for name in settings.schedules]


def compare(model: nn.Sequential, grid: Grid, settings: PipelineSettings) -> dict[str, float]:
    """The largest difference of any gradient of this stage from one process's with the whole batch, in float64, by
    schedule. The batch is a small one: every rank also does the work of one process."""
    samples = min(settings.microbatch_size, FEW) * settings.microbatches * settings.data_parallel
    few = replace(settings, batch_size=samples)
    [(images, labels)] = batches(few, 1, torch.float64)
    own = cut(model, grid.stage, grid.stages)
    report(phase="one process")
    F.cross_entropy(model(images), labels).backward()
    expected, found = gradients(own), {}
    warm_up(own, grid, few, torch.float64)
    for name in settings.schedules:
        report(phase=f"{name}: comparing with one process")
        own.zero_grad()
        stage = Stage(own, grid)
        stage.load(images, labels, settings.microbatches)
        SCHEDULES[name].code(stage, settings.microbatches)
        stage.finish()
        found[name] = (gradients(own) - expected).abs().max().item()
    return found


def warm_up(model: nn.Module, grid: Grid, settings: PipelineSettings, dtype: torch.dtype) -> None:
    """Where it must not come later: load this stage's kernels, fetch its memory, open its links.

    A receive that is posted on a GPU is a kernel, which runs until the message comes. Beside it the first launch of
    another kernel, or a fetch of memory, may wait until the GPU is idle: the neighbour then waits for this stage, and
    this stage for the neighbour. So all microbatches go forward and back once before, with nothing to receive.
    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#lazy-loading
    """
    if not backend_of().loads_kernels_late:
        return
    labels = torch.zeros(settings.microbatch_size, dtype=torch.int64, device=device())
    inputs = torch.ones(settings.microbatches, settings.microbatch_size, WIDTH, dtype=dtype, device=device())
    outputs = [model(each.clone().requires_grad_()) for each in inputs]
    if grid.is_last:
        outputs = [F.cross_entropy(output, labels) / settings.microbatches for output in outputs]
    for output in outputs:
        output.backward(torch.ones_like(output))
    model.zero_grad()
    for (source, target), link in grid.links.items():  # in this order on every rank: a link opens where both ends come
        if dist.get_rank() == source:
            dist.send(labels, target, group=link)
        elif dist.get_rank() == target:
            dist.recv(labels, source, group=link)
    synchronize()


def train(name: str, model: nn.Module, grid: Grid, settings: PipelineSettings, difference: float) -> StageRun:
    """Train this stage by one schedule, and measure. Activations are counted in the first step, which is not timed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    stage, counter, schedule = Stage(model, grid), ActivationCounter(model), SCHEDULES[name].code
    losses, steps, most_held = [], [], 0
    every = settings.steps + WARM_UP
    for number, (images, labels) in enumerate(batches(settings, every)):
        report(phase=f"{name}: training", step=number, steps=every)
        optimizer.zero_grad()
        dist.barrier()
        stage.load(images, labels, settings.microbatches)
        stage.stopwatch.slots = []
        with contextlib.nullcontext() if number else counter:
            schedule(stage, settings.microbatches)
        stage.finish()
        optimizer.step()
        losses += [stage.loss] if grid.is_last else []
        steps.append(stage.stopwatch.slots)
        most_held = max(most_held, stage.most_held)
    return StageRun(
        gradient_difference=difference, held=most_held, held_bytes=counter.peak, losses=losses, steps=steps[WARM_UP:]
    )


def batches(settings: PipelineSettings, steps: int, dtype: torch.dtype = torch.float32) -> Iterator[Batch]:
    """Whole batches (images [samples, 784], labels [samples]), in the order of the file, from its start again after its
    end."""
    data = Images(settings.folder, "train", settings.limit)
    for step in range(steps):
        images, labels = data.span(step * settings.batch_size, settings.batch_size)
        yield images.flatten(1).to(device(), dtype), labels.to(device())


def gradients(model: nn.Module) -> torch.Tensor:
    """All gradients in a row, [elements]."""
    return flat(param.grad for param in model.parameters())
