"""A model in stages over ranks: three schedules, and what each costs in idle time and in memory.

    python -m playground pipeline
    python -m playground pipeline -n 4 --schedule 1f1b --microbatches 16

Each rank holds one stage of the model. A batch is cut into microbatches: each goes forward through the stages as
activations, and its gradients come back. A schedule says in which order a stage does that; whatever the order, the
gradients are those of one process with the whole batch, which the run proves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.lessons.pipeline.stages import Pipeline


def naive(stage: Stage, microbatches: int) -> None:
    """Each microbatch goes there and back before the next one starts: one stage works while all others wait."""
    for m in range(microbatches):
        stage.forward(m)
        stage.backward(m)


def gpipe(stage: Stage, microbatches: int) -> None:
    """All microbatches forward, then all backward: stages work at the same time, but hold the activations of all."""
    for m in range(microbatches):
        stage.forward(m)
    for m in range(microbatches):
        stage.backward(m)


def one_forward_one_backward(stage: Stage, microbatches: int) -> None:
    """Each stage goes as many forwards ahead as there are stages behind it; then it alternates. It idles no longer than
    with GPipe, but each backward frees activations before the next forward saves some."""
    ahead = min(microbatches, stage.pipeline.stages - 1 - stage.pipeline.stage)
    for m in range(ahead):
        stage.forward(m)
    for m in range(ahead, microbatches):
        stage.forward(m)
        stage.backward(m - ahead)
    for m in range(microbatches - ahead, microbatches):
        stage.backward(m)


class Stage:
    """This rank's part of the model, and its four links: activations come in and go out, gradients the other way.
    `model` takes [samples, width] and returns as much; the last stage's returns logits [samples, classes]. A stage of a
    different model has a `compute` of its own."""

    def __init__(self, model: nn.Module, pipeline: Pipeline) -> None:
        self.model, self.pipeline, self.targets = model, pipeline, 1

    def load(
        self, images: torch.Tensor, labels: torch.Tensor, microbatches: int, hidden: torch.Tensor | None = None
    ) -> None:
        """Take a batch of images [samples, width] and labels [samples], in microbatches, whose sizes differ by at most
        1. Labels of -100 are ignored, as by `F.cross_entropy`. What stages send each other is like `hidden`, which has
        as many samples, or else like the images."""
        pipeline, rank = self.pipeline, dist.get_rank()
        self.images, self.labels = images.tensor_split(microbatches), labels.tensor_split(microbatches)
        self.targets = int((labels != -100).sum())
        like = self.images if hidden is None else hidden.tensor_split(microbatches)
        self.loss, self.held = 0.0, dict[int, tuple[torch.Tensor, torch.Tensor]]()
        if not pipeline.is_first:
            before = pipeline.row[pipeline.stage - 1]
            self.inputs = Inbox(before, pipeline.links[before, rank], like)
            self.input_gradients = Outbox(before, pipeline.links[rank, before])
        if not pipeline.is_last:
            after = pipeline.row[pipeline.stage + 1]
            self.outputs = Outbox(after, pipeline.links[rank, after])
            self.output_gradients = Inbox(after, pipeline.links[after, rank], like)

    def forward(self, m: int) -> None:
        """Compute microbatch `m` and send the activations on; the last stage computes its part of the mean loss.
        Whatever autograd needs for `backward` is held until then."""
        inputs = self.images[m] if self.pipeline.is_first else self.inputs.take().requires_grad_()
        output = self.compute(m, inputs)
        if self.pipeline.is_last:
            self.loss += output.item()
        else:
            self.outputs.put(output.detach())
        self.held[m] = inputs, output

    def compute(self, m: int, inputs: torch.Tensor) -> torch.Tensor:
        """The activations of microbatch `m`; in the last stage its part of the mean loss."""
        output = self.model(inputs)
        if self.pipeline.is_last:
            output = F.cross_entropy(output, self.labels[m], reduction="sum") / self.targets
        return output

    def backward(self, m: int) -> None:
        """Compute the gradients of microbatch `m`, add them to those of the parameters, and send that of the input back
        to the stage that the input came from."""
        gradient = None if self.pipeline.is_last else self.output_gradients.take()
        inputs, output = self.held.pop(m)
        self.compute_gradients(m, output, gradient)
        if not self.pipeline.is_first:
            self.input_gradients.put(inputs.grad)

    def compute_gradients(self, m: int, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Those of this stage, for microbatch `m`, from that of its output."""
        output.backward(gradient)

    def finish(self) -> None:
        """Wait until all has been sent."""
        if not self.pipeline.is_first:
            self.input_gradients.wait()
        if not self.pipeline.is_last:
            self.outputs.wait()


class Inbox:
    """A tensor from rank `source` for each tensor of `like`, in order. While one is worked on the next may arrive."""

    def __init__(self, source: int, group: dist.ProcessGroup, like: Sequence[torch.Tensor]) -> None:
        buffers = map(torch.empty_like, like)
        self.coming: Iterator[Any] = ((buffer, dist.irecv(buffer, source, group=group)) for buffer in buffers)
        self.first = next(self.coming)

    def take(self) -> torch.Tensor:
        tensor, request = self.first
        request.wait()
        self.first = next(self.coming, None)
        return tensor


class Outbox:
    """Tensors for rank `target`, in order. Computing continues while one is sent; the next waits until it has gone."""

    def __init__(self, target: int, group: dist.ProcessGroup) -> None:
        self.target, self.group = target, group
        self.sending: tuple[dist.Work, torch.Tensor] | None = None

    def put(self, tensor: torch.Tensor) -> None:
        """Send a tensor, which is kept until it has gone: memory that is freed may be overwritten."""
        self.wait()
        self.sending = dist.isend(tensor, self.target, group=self.group), tensor

    def wait(self) -> None:
        if self.sending is not None:
            self.sending[0].wait()
            self.sending = None


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
