"""The order of 1F1B: what a stage keeps is bounded by its place, and no stage waits for one that waits for it."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.exercises.cases import Case, Cases, gradients
from playground.exercises.exercise import count
from playground.exercises.pipeline.stages import new_pipeline


class StageProgram:
    """Forward and backward of one rank's stage, with their messages; the order of the calls is kept."""

    def __init__(self, rank: int, size: int, stage: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.stage, self.inputs, self.targets = stage, inputs, targets
        self.before, self.behind = rank - 1, (rank + 1) % size
        self.order: list[str] = []
        self.sending: list[dist.Work] = []
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, m: int) -> None:
        self.order.append(f"F{m}")
        if not 0 <= m < len(self.inputs):
            raise IndexError(f"forward({m}): there are {len(self.inputs)} microbatches")
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

    def finish(self) -> None:
        for request in self.sending:
            request.wait()


def cases(rank: int, size: int, seed: int) -> Cases:
    for microbatches in (4, 2, 1):
        *mine, due = new_pipeline(rank, size, seed, microbatches)
        stage = StageProgram(rank, size, *mine)
        order, forwards, backwards = list[str](), 0, 0
        while backwards < microbatches:  # forward, while there is room for its activations
            if forwards < microbatches and forwards - backwards < size - rank:
                order.append(f"F{forwards}")
                forwards += 1
            else:
                order.append(f"B{backwards}")
                backwards += 1
        yield Case(
            count(microbatches, "microbatch", "es"),
            (stage, microbatches),
            held=lambda stage=stage: {"order": stage.order, "grad": gradients(stage.stage)},
            expected={"order": order, "grad": due},
            is_coded=False,
        )
