"""The schedules on a real model, on every rank: do they give one process's gradients, and what does each cost?

Timed are the forwards and backwards of a stage; memory is counted as autograd saves and frees it.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.lessons.pipeline.lesson import Stage
from playground.lessons.pipeline.page import BLOCKS, SCHEDULES, WARM_UP, WIDTH, PipelineSettings
from playground.lessons.pipeline.stages import Grid, cut, make_grid, new_model
from playground.measurement import Fields
from playground.runtime import device, host, report, synchronize
from playground.runtime.backends import backend_of
from playground.runtime.meeting.agreement import all_gather_object
from playground.training.activations import ActivationCounter
from playground.training.data import Batch, Images
from playground.training.replicas import flat

FEW = 4
"""Samples of a microbatch, where schedules are compared with one process."""


def run(rank: int, size: int, settings: PipelineSettings) -> list[Fields]:
    """With each schedule, on this rank: one batch in float64, compared with one process; then training in float32."""
    grid, model = make_grid(settings.data_parallel), new_model(BLOCKS, WIDTH, settings.seed).to(device())
    differences = compare(copy.deepcopy(model).double(), grid, settings)
    own = cut(model, grid.stage, grid.stages)
    warm_up(Stage(own, grid), *blank_batch(settings, torch.float32))
    return [
        train_and_measure(name, copy.deepcopy(own), grid, settings, differences[name]) for name in settings.schedules
    ]


def compare(model: nn.Sequential, grid: Grid, settings: PipelineSettings) -> dict[str, float]:
    """The largest difference of any gradient of this stage from one process's with the whole batch, in float64, by
    schedule. The batch is a small one: every rank also does the work of one process."""
    samples = min(settings.microbatch_size, FEW) * settings.microbatches * settings.data_parallel
    few = replace(settings, batch_size=samples)
    [(images, labels)] = batches(few, 1, torch.float64)
    own = cut(model, grid.stage, grid.stages)
    report(phase="one process")
    F.cross_entropy(model(images), labels).backward()
    expected, found = flat(param.grad for param in own.parameters()), {}
    warm_up(Stage(own, grid), *blank_batch(few, torch.float64))
    for name in settings.schedules:
        report(phase=f"{name}: comparing with one process")
        own.zero_grad()
        stage = Stage(own, grid)
        stage.load(images, labels, settings.microbatches)
        SCHEDULES[name].code(stage, settings.microbatches)
        stage.finish()
        found[name] = (flat(param.grad for param in own.parameters()) - expected).abs().max().item()
    return found


def blank_batch(settings: PipelineSettings, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs of any stage, and labels, by microbatch."""
    count, samples = settings.microbatches, settings.microbatch_size
    inputs = [torch.ones(samples, WIDTH, dtype=dtype, device=device()).requires_grad_() for _ in range(count)]
    return inputs, [torch.zeros(samples, dtype=torch.int64, device=device())] * count


def warm_up(stage: Stage, inputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> None:
    """Where it must not come later: load this stage's kernels, fetch its memory, open its links. Inputs and labels are
    of microbatches.

    A receive that is posted on a GPU is a kernel, which runs until the message comes. Beside it the first launch of
    another kernel, or a fetch of memory, may wait until the GPU is idle: the neighbour then waits for this stage, and
    this stage for the neighbour. So all microbatches go forward and back once before, with nothing to receive.
    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#lazy-loading
    """
    if not backend_of().loads_kernels_late:
        return
    stage.labels, message = labels, torch.zeros(1, device=device())
    for output in [stage.compute(m, each) for m, each in enumerate(inputs)]:
        output.backward(torch.ones_like(output))
    stage.model.zero_grad()
    for (source, target), link in stage.grid.links.items():  # in this order on every rank: both ends come
        if dist.get_rank() == source:
            dist.send(message, target, group=link)
        elif dist.get_rank() == target:
            dist.recv(message, source, group=link)
    synchronize()


def train_and_measure(name: str, model: nn.Module, grid: Grid, settings: PipelineSettings, difference: float) -> Fields:
    """Train this stage by one schedule, and measure: the microbatches whose activations it held at once, at most, and
    the bytes that autograd saved for them, in float32, without parameters; on the last stage the losses of this
    replica's part of the batch, by step; and the forwards and backwards of the steps that are timed, in order, in
    seconds on a clock that all ranks share. Activations are counted in the first step, which is not timed."""
    stage, counter, code = MeasuredStage(model, grid), ActivationCounter(model), SCHEDULES[name].code
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    losses, steps, every = list[float](), list[list[Fields]](), settings.steps + WARM_UP
    for number, (images, labels) in enumerate(batches(settings, every)):
        report(phase=f"{name}: training", step=number, steps=every)
        dist.barrier()
        stage.stopwatch.slots = []
        optimizer.zero_grad()
        stage.load(images, labels, settings.microbatches)
        with contextlib.nullcontext() if number else counter:
            code(stage, settings.microbatches)
        stage.finish()
        optimizer.step()
        losses.append(stage.loss)
        steps.append(stage.stopwatch.slots)
    held, known = {"held": stage.most_held, "held_bytes": counter.peak}, losses if grid.is_last else []
    return {"gradient_difference": difference, **held, "losses": known, "steps": steps[WARM_UP:]}


def batches(settings: PipelineSettings, steps: int, dtype: torch.dtype = torch.float32) -> Iterator[Batch]:
    """Whole batches (images [samples, 784], labels [samples]), in the order of the file, from its start again after its
    end."""
    data = Images(settings.folder, "train", settings.limit)
    for step in range(steps):
        images, labels = data.span(step * settings.batch_size, settings.batch_size)
        yield images.flatten(1).to(device(), dtype), labels.to(device())


class Stopwatch:
    """Seconds since all ranks made theirs together. Ranks of a host have one clock, so that their times can be compared
    exactly; those of several hosts began when they left a barrier, at almost the same moment."""

    def __init__(self) -> None:
        self.slots: list[Fields] = []
        dist.barrier()
        here = host.host_id()
        self.origin = min(start for there, start in all_gather_object((here, self.now())) if there == here)

    def now(self) -> float:
        """Seconds, when this rank's work so far is done. On a GPU only what was computed: to wait for messages, too,
        would be to wait for a neighbour that may be waiting for us."""
        if device().type == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    @contextlib.contextmanager
    def slot(self, kind: str, microbatch: int) -> Iterator[None]:
        start = self.now()
        yield
        times = {"start": start - self.origin, "end": self.now() - self.origin}
        self.slots.append({"kind": kind, "microbatch": microbatch, **times})


class MeasuredStage(Stage):
    """A stage that takes the time of each forward and backward, without the messages, and counts what it holds."""

    def __init__(self, model: nn.Module, grid: Grid) -> None:
        super().__init__(model, grid)
        self.stopwatch, self.most_held = Stopwatch(), 0

    def compute(self, m: int, inputs: torch.Tensor) -> torch.Tensor:
        self.most_held = max(self.most_held, len(self.held) + 1)  # with this one
        with self.stopwatch.slot("F", m):
            return super().compute(m, inputs)

    def compute_gradients(self, m: int, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        with self.stopwatch.slot("B", m):
            super().compute_gradients(m, output, gradient)
