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
from playground.lessons.pipeline.stages import Pipeline, cut, join_pipeline, new_model
from playground.measurement import Fields
from playground.runtime import device, report, synchronize
from playground.runtime.backends import backend_of
from playground.training.activations import ActivationCounter
from playground.training.data import Batch, Images
from playground.training.replicas import flat

FEW = 4
"""Samples of a microbatch, where schedules are compared with one process."""


def run(rank: int, size: int, settings: PipelineSettings) -> list[Fields]:
    """With each schedule, on this rank: one batch in float64, compared with one process; then training in float32."""
    pipeline, model = join_pipeline(), new_model(BLOCKS, WIDTH, settings.seed).to(device())
    differences = compare(copy.deepcopy(model).double(), pipeline, settings)
    own = cut(model, pipeline.stage, pipeline.stages)
    warm_up(Stage(own, pipeline), *blank_batch(settings, torch.float32))
    return [
        train_and_measure(name, copy.deepcopy(own), pipeline, settings, differences[name])
        for name in settings.schedules
    ]


def compare(model: nn.Sequential, pipeline: Pipeline, settings: PipelineSettings) -> dict[str, float]:
    """The largest difference of any gradient of this stage from one process's with the whole batch, in float64, by
    schedule. The batch is a small one: every rank also does the work of one process."""
    few = replace(settings, batch_size=min(settings.batch_size, FEW * settings.microbatches))
    [(images, labels)] = batches(few, 1, torch.float64)
    own = cut(model, pipeline.stage, pipeline.stages)
    report(phase="one process")
    F.cross_entropy(model(images), labels).backward()
    expected, found = flat(param.grad for param in own.parameters()), {}
    warm_up(Stage(own, pipeline), *blank_batch(few, torch.float64))
    for name in settings.schedules:
        report(phase=f"{name}: comparing with one process")
        own.zero_grad()
        stage = Stage(own, pipeline)
        stage.load(images, labels, settings.microbatches)
        SCHEDULES[name].code(stage, settings.microbatches)
        stage.finish()
        found[name] = (flat(param.grad for param in own.parameters()) - expected).abs().max().item()
    return found


def blank_batch(settings: PipelineSettings, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs of any stage, and labels, by microbatch."""
    count, samples = settings.microbatches, settings.batch_size // settings.microbatches
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
    for (source, target), link in stage.pipeline.links.items():  # in this order on every rank: both ends come
        if dist.get_rank() == source:
            dist.send(message, target, group=link)
        elif dist.get_rank() == target:
            dist.recv(message, source, group=link)
    synchronize()


def train_and_measure(
    name: str, model: nn.Module, pipeline: Pipeline, settings: PipelineSettings, difference: float
) -> Fields:
    """Train this stage by one schedule, and measure: the microbatches whose activations it held at once, at most, and
    the bytes that autograd saved for them, in float32, without parameters; on the last stage the losses, by step; and
    the forwards and backwards of the steps that are timed, in order, in seconds since 1970. Activations are counted in
    the first step, which is not timed."""
    stage, counter, code = MeasuredStage(model, pipeline), ActivationCounter(model), SCHEDULES[name].code
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    losses, steps, every = list[float](), list[list[Fields]](), settings.steps + WARM_UP
    for number, (images, labels) in enumerate(batches(settings, every)):
        report(phase=f"{name}: training", step=number, steps=every)
        dist.barrier()
        stage.slots = []
        optimizer.zero_grad()
        stage.load(images, labels, settings.microbatches)
        with contextlib.nullcontext() if number else counter:
            code(stage, settings.microbatches)
        stage.finish()
        optimizer.step()
        losses.append(stage.loss)
        steps.append(stage.slots)
    held, known = {"held": stage.most_held, "held_bytes": counter.peak}, losses if pipeline.is_last else []
    return {"gradient_difference": difference, **held, "losses": known, "steps": steps[WARM_UP:]}


def batches(settings: PipelineSettings, steps: int, dtype: torch.dtype = torch.float32) -> Iterator[Batch]:
    """Whole batches (images [samples, 784], labels [samples]), in the order of the file, from its start again after its
    end."""
    data = Images(settings.folder, "train", settings.limit)
    for step in range(steps):
        images, labels = data.span(step * settings.batch_size, settings.batch_size)
        yield images.flatten(1).to(device(), dtype), labels.to(device())


class MeasuredStage(Stage):
    """A stage that takes the time of each forward and backward, without the messages, and counts what it holds."""

    def __init__(self, model: nn.Module, pipeline: Pipeline) -> None:
        super().__init__(model, pipeline)
        self.slots, self.most_held = list[Fields](), 0

    def compute(self, m: int, inputs: torch.Tensor) -> torch.Tensor:
        self.most_held = max(self.most_held, len(self.held) + 1)  # with this one
        with self.slot("F", m):
            return super().compute(m, inputs)

    def compute_gradients(self, m: int, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        with self.slot("B", m):
            super().compute_gradients(m, output, gradient)

    @contextlib.contextmanager
    def slot(self, kind: str, microbatch: int) -> Iterator[None]:
        start = now()
        yield
        self.slots.append({"kind": kind, "microbatch": microbatch, "start": start, "end": now()})


def now() -> float:
    """The time, which ranks of a host share, when this rank's work so far is done. On a GPU only what was computed: to
    wait for messages, too, would be to wait for a neighbour that may be waiting for us."""
    if device().type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.time()
