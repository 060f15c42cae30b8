"""The schedules on a real model, on every rank: do they give one process's gradients, and what does
each cost?

Timed are the forwards and backwards of a stage; memory is counted as autograd saves and frees it.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

# the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.lessons.memory.lesson import Activations
from playground.lessons.pipeline.lesson import Stage, new_groups, split, step
from playground.lessons.pipeline.page import (
    BLOCKS,
    SCHEDULES,
    WARM_UP,
    WIDTH,
    PipelineSettings,
    Slot,
    StageResult,
)
from playground.runtime import device, report, synchronize
from playground.runtime.backends import backend_of
from playground.training.data import Batch, Images
from playground.training.replicas import flatten, max_abs_diff

FEW = 4
"""Samples of a microbatch, where schedules are compared with one process."""


Groups = dict[tuple[int, int], dist.ProcessGroup]
"""What `new_groups` returns."""


def run(rank: int, size: int, settings: PipelineSettings) -> list[StageResult]:
    """With each schedule, on this rank: one batch in float64, compared with one process; then
    training in float32."""
    groups = new_groups(range(size))
    model = new_model(BLOCKS, WIDTH, settings.seed).to(device())
    differences = compare(copy.deepcopy(model).double(), groups, settings)
    own = split(model, rank, size)
    warm_up(Stage(own, range(size), groups), *blank_batch(settings, torch.float32))
    return [
        train_and_measure(
            name,
            MeasuredStage(copy.deepcopy(own), range(size), groups),
            settings,
            differences[name],
        )
        for name in settings.schedules
    ]


def new_block(width: int) -> nn.Sequential:
    """[samples, width] → [samples, width]. Weights are drawn as He et al. (2015) do for ReLU, so
    that what goes in and what comes out are of one size, however many blocks there are."""
    linear = nn.Linear(width, width)
    nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
    return nn.Sequential(linear, nn.ReLU())


def new_model(blocks: int, width: int, seed: int) -> nn.Sequential:
    """Equal blocks, and a last layer of 10 logits, which is small beside them. The same on every
    rank."""
    torch.manual_seed(seed)
    return nn.Sequential(*(new_block(width) for _ in range(blocks)), nn.Linear(width, 10))


def compare(model: nn.Sequential, groups: Groups, settings: PipelineSettings) -> dict[str, float]:
    """The largest difference of any gradient of this stage from one process's with the whole batch,
    in float64, by schedule. The batch is a small one: every rank also does the work of one
    process."""
    few = replace(settings, batch_size=min(settings.batch_size, FEW * settings.microbatches))
    [(images, labels)] = batches(few, 1, torch.float64)
    stage = Stage(split(model, dist.get_rank(), settings.size), range(settings.size), groups)
    report(phase="one process")
    F.cross_entropy(model(images), labels).backward()
    expected = flatten(param.grad for param in stage.model.parameters())
    found = dict[str, float]()
    warm_up(stage, *blank_batch(few, torch.float64))
    for name in settings.schedules:
        report(phase=f"{name}: comparing with one process")
        stage.model.zero_grad()
        stage.load(images, labels, settings.microbatches)
        SCHEDULES[name].code(stage, settings.microbatches)
        stage.finish()
        gradients = flatten(param.grad for param in stage.model.parameters())
        found[name] = max_abs_diff(gradients, expected)
    return found


def blank_batch(
    settings: PipelineSettings, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs of any stage, and labels, by microbatch."""
    count, samples = settings.microbatches, settings.batch_size // settings.microbatches
    inputs = [
        torch.ones(samples, WIDTH, dtype=dtype, device=device()).requires_grad_()
        for _ in range(count)
    ]
    return inputs, [torch.zeros(samples, dtype=torch.int64, device=device())] * count


def warm_up(stage: Stage, inputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> None:
    """Where it must not come later: load this stage's kernels, fetch its memory, open its links.
    Inputs and labels are of microbatches.

    A receive that is posted on a GPU is a kernel, which runs until the message comes. Beside it the
    first launch of another kernel, or a fetch of memory, may wait until the GPU is idle: the
    neighbour then waits for this stage, and this stage for the neighbour. So all microbatches go
    forward and back once before, with nothing to receive. Source:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#lazy-loading
    """
    if not backend_of().loads_kernels_late:
        return
    stage.labels = labels
    stage.targets = 1
    for output in [stage.compute(m, each) for m, each in enumerate(inputs)]:
        output.backward(torch.ones_like(output))
    stage.model.zero_grad()
    message = torch.zeros(1, device=device())
    # in this order on every rank: both ends come
    for (source, target), group in stage.groups.items():
        if stage.index == source:
            dist.send(message, stage.ranks[target], group=group)
        elif stage.index == target:
            dist.recv(message, stage.ranks[source], group=group)
    synchronize()


def train_and_measure(
    name: str, stage: MeasuredStage, settings: PipelineSettings, difference: float
) -> StageResult:
    """Train this stage by one schedule. Activations are counted in the first step, which is not
    timed."""
    counter = Activations(stage.model)
    optimizer = torch.optim.SGD(
        stage.model.parameters(), lr=settings.lr, momentum=settings.momentum
    )
    losses = list[float]()
    steps = list[list[Slot]]()
    count = settings.steps + WARM_UP
    for index, batch in enumerate(batches(settings, count)):
        report(phase=f"{name}: training", way=name, step=index, steps=count)
        dist.barrier()
        stage.slots = []
        with contextlib.nullcontext() if index else counter:
            code = SCHEDULES[name].code
            losses.append(step(stage, code, optimizer, *batch, settings.microbatches))
        steps.append(stage.slots)
    return StageResult(
        gradient_difference=difference,
        held=stage.most_held,
        held_bytes=counter.peak,
        losses=losses if stage.is_last else [],
        steps=steps[WARM_UP:],
    )


def batches(
    settings: PipelineSettings, steps: int, dtype: torch.dtype = torch.float32
) -> Iterator[Batch]:
    """Whole batches (images [samples, 784], labels [samples]), in the order of the file, from its
    start again after its end."""
    data = Images(settings.folder, "train", settings.limit)
    for index in range(steps):
        images, labels = data.span(index * settings.batch_size, settings.batch_size)
        yield images.flatten(1).to(device(), dtype), labels.to(device())


class MeasuredStage(Stage):
    """A stage that takes the time of each forward and backward, without the messages."""

    def __init__(self, model: nn.Module, ranks: Sequence[int], groups: Groups) -> None:
        super().__init__(model, ranks, groups)
        self.slots = list[Slot]()

    def load(self, images: torch.Tensor, labels: torch.Tensor, microbatches: int) -> None:
        """Each microbatch has memory of its own, which is counted as long as it is held."""
        super().load(images, labels, microbatches)
        self.images = tuple(each.clone() for each in self.images)
        self.labels = tuple(each.clone() for each in self.labels)

    def compute(self, m: int, inputs: torch.Tensor) -> torch.Tensor:
        with self.slot("F", m):
            return super().compute(m, inputs)

    def backward(self, m: int) -> None:
        inputs, output = self.held[m]
        self.held[m] = inputs, TimedOutput(output, self.slot("B", m))
        super().backward(m)

    @contextlib.contextmanager
    def slot(self, kind: str, microbatch: int) -> Iterator[None]:
        start = now()
        yield
        self.slots.append(Slot(kind, microbatch, start, now()))


@dataclass
class TimedOutput:
    """The output of a stage, whose backward is timed: the stage waits for messages before and after
    it."""

    output: torch.Tensor
    slot: contextlib.AbstractContextManager[None]

    def backward(self, gradient: torch.Tensor | None) -> None:
        with self.slot:
            self.output.backward(gradient)


def now() -> float:
    """The time, which ranks of a host share, when this rank's work so far is done. On a GPU only
    what was computed: to wait for messages, too, would be to wait for a neighbour that may be
    waiting for us."""
    if device().type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.time()
