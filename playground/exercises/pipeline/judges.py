"""Judges of the exercises on pipeline."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.exercises.cases import Case, Cases, gradients, held_gradients, predict
from playground.exercises.layouts import POWERS, choose
from playground.training.mesh_costs import TrainingTask, hosts_of_eight
from playground.ui.units import plural
from playground.world.rendezvous.agreement import all_gather_object

WIDTH = 3


def new_pipeline(
    rank: int, size: int, seed: int, microbatches: int
) -> tuple[nn.Module, torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """One rank's part of a model that is the same on all ranks: its stage, [samples, WIDTH] → as
    much; inputs, zeros on all but the first rank, and targets, zeros on all but the last one, both
    [microbatches, samples, WIDTH]; and the gradients of the stage's parameters, of the mean squared
    error over the batch."""
    torch.manual_seed(seed)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(size)]
    inputs, targets = torch.randn(2, microbatches, 4, WIDTH).double()
    whole = copy.deepcopy(stages)
    F.mse_loss(nn.Sequential(*whole)(inputs), targets).backward()
    if rank > 0:
        inputs = torch.zeros_like(inputs)
    if rank < size - 1:
        targets = torch.zeros_like(targets)
    return stages[rank], inputs, targets, gradients(whole[rank])


def gpipe(rank: int, size: int, seed: int) -> Cases:
    """Forward through all stages and back, one microbatch after the other. One process is the
    oracle."""
    for microbatches in (3, 1, 6):
        stage, inputs, targets, due = new_pipeline(rank, size, seed, microbatches)
        order: list[str] = []
        stage.register_forward_hook(partial(note, order))
        forward, backward = ([f"{step}{m}" for m in range(microbatches)] for step in "FB")
        neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < size]
        yield Case(
            plural(microbatches, "microbatch", "es"),
            (stage, inputs, targets),
            held=partial(describe_order, stage, order, microbatches),
            expected={"forward": forward, "backward": backward, "grad": due},
            is_coded=False,
            most=dict.fromkeys(neighbours, inputs.numel()),
        )


def describe_order(stage: nn.Module, order: list[str], forwards: int) -> dict[str, object]:
    """The steps of a stage, of which the first are to be forwards, as many as are said."""
    return {
        "forward": order[:forwards],
        "backward": sorted(order[forwards:]),
        "grad": gradients(stage),
    }


def note(order: list[str], stage: object, args: object, output: torch.Tensor) -> None:
    """The stage goes forward: F0 is its first microbatch, B0 the backward of it."""
    number = sum(step[0] == "F" for step in order)
    order.append(f"F{number}")
    output.register_hook(lambda gradient: order.append(f"B{number}"))


class StageProgram:
    """Forward and backward of one rank's stage, with their messages; the order of the calls is
    kept."""

    def __init__(
        self, rank: int, size: int, stage: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
    ) -> None:
        self.stage = stage
        self.inputs = inputs
        self.targets = targets
        self.before = rank - 1
        self.behind = (rank + 1) % size
        self.order: list[str] = []
        self.sending: list[dist.Work] = []
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, m: int) -> None:
        self.order.append(f"F{m}")
        if not 0 <= m < len(self.inputs):
            there = plural(len(self.inputs), "microbatch", "es")
            raise IndexError(f"forward({m}): the batch has {there}")
        features = self.inputs[m]
        if self.before >= 0:
            dist.recv(features, self.before)
            features.requires_grad_()
        output = self.stage(features)
        if self.behind:
            self.sending.append(dist.isend(output.detach(), self.behind))
        else:
            output = F.mse_loss(output, self.targets[m]) / len(self.inputs)
        self.held[m] = features, output

    def backward(self, m: int) -> None:
        self.order.append(f"B{m}")
        if m not in self.held:
            raise IndexError(f"backward({m}): it has not gone forward, or was backward already")
        features, output = self.held.pop(m)
        gradient = torch.empty_like(output) if self.behind else None
        if gradient is not None:
            dist.recv(gradient, self.behind)
        output.backward(gradient)
        if self.before >= 0:
            self.sending.append(dist.isend(features.grad, self.before))

    def describe(self) -> dict[str, object]:
        return {"order": self.order, "grad": gradients(self.stage)}

    def finish(self) -> None:
        for request in self.sending:
            request.wait()


def order_of(room: int, microbatches: int) -> list[str]:
    """A stage's order if it goes forward as long as there is room for this many microbatches: of
    GPipe with room for all, of 1F1B with room for S - s on stage s of S."""
    order, forwards, backwards = list[str](), 0, 0
    while backwards < microbatches:
        if forwards < microbatches and forwards - backwards < room:
            order.append(f"F{forwards}")
            forwards += 1
        else:
            order.append(f"B{backwards}")
            backwards += 1
    return order


def one_forward_one_backward(rank: int, size: int, seed: int) -> Cases:
    """The order of 1F1B: what a stage keeps is bounded by its place, and no stage waits for one
    that waits for it."""
    for microbatches in (4, 2, 1):
        *mine, due = new_pipeline(rank, size, seed, microbatches)
        stage, order = StageProgram(rank, size, *mine), order_of(size - rank, microbatches)
        yield Case(
            plural(microbatches, "microbatch", "es"),
            (stage, microbatches),
            held=stage.describe,
            expected={"order": order, "grad": due},
            is_coded=False,
        )


def clip(rank: int, size: int, seed: int) -> Cases:
    """The norm of gradients of which each rank has a part."""
    for about, max_norm, without, scale in (
        ("a norm that is too large", 1.0, None, 1),
        ("a norm within the limit", 1e6, None, 1),
        ("no gradients on the last rank", 2.0, size - 1, 1),
        ("gradients of zeros", 1.0, None, 0),
    ):
        weight, bias = torch.arange(600).view(20, 30) % 6 + 1.0, torch.full((20,), 3.0)
        everyones = [[scale * (weight + other), scale * bias] for other in range(size)]
        squares = [
            each.square().sum()
            for r, grads in enumerate(everyones)
            for each in grads
            if r != without
        ]
        norm = sum(squares, torch.zeros(())).sqrt().item()
        stage = nn.Linear(30, 20)
        for param, grad in zip(stage.parameters(), everyones[rank], strict=True):
            param.grad = None if rank == without else grad.clone()
        factor = min(1.0, max_norm / norm) if norm else 1.0
        due = [None if rank == without else grad * factor for grad in everyones[rank]]
        held, expected = partial(held_gradients, stage), {"grad": due}
        most = 100 * (size - 1)  # some numbers, also as objects
        yield Case(
            about,
            (stage, max_norm),
            norm,
            held=held,
            expected=expected,
            is_coded=False,
            most_moved=most,
        )


def activations_held(rank: int, size: int, seed: int) -> Cases:
    """The most microbatches that each stage holds, by GPipe and 1F1B, and the messages it sends."""
    for microbatches in (3, 1, 6):
        held = []
        for room in (microbatches, size - rank):
            stage = StageProgram(rank, size, *new_pipeline(rank, size, seed, microbatches)[:3])
            most = 0
            for step in order_of(room, microbatches):
                work = stage.forward if step[0] == "F" else stage.backward
                work(int(step[1:]))
                most = max(most, len(stage.held))
            stage.finish()
            held.append(most)
        counted = {
            "gpipe": all_gather_object(held[0]),
            "one_forward_one_backward": all_gather_object(held[1]),
            "messages": all_gather_object(len(stage.sending)),
        }
        yield predict(plural(microbatches, "microbatch", "es"), (size, microbatches), counted)


def fit_the_stages(rank: int, size: int, seed: int) -> Cases:
    """Replicas, stages and tensor parallelism, with little memory."""
    task = TrainingTask(
        layers=40, width=5120, length=2048, sequences=256,
        gpus=64, memory=16e9, flops=150e12, machine=hosts_of_eight(5e9, 200e9),
    )  # fmt: skip
    about = "12.6 billion parameters on 64 GPUs of 16 GB"
    yield choose(about, task, {"dp": POWERS, "pp": POWERS, "tp": POWERS})
