"""Pipeline parallelism: a model in stages over ranks, and three orders in which they can work.

    torchrun --nproc-per-node 4 lesson.py
    python -m playground pipeline
    python -m playground pipeline -n 4 --schedule 1f1b --microbatches 16

Each rank holds one stage of the model. A batch is split into microbatches: each goes forward
through the stages as activations, and its gradients come back. A schedule is the order in which a
stage does that; whatever the order, the gradients are those of one process with the whole batch.
Source: Narayanan et al., Megatron-LM on GPU clusters, 2021, arXiv 2104.04473
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def new_groups(ranks: Sequence[int]) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A group for each direction between neighbours, by (from, to); stage s is on `ranks[s]`.

    Every rank calls this, also one that is not among `ranks`, as with `new_group`. NCCL carries out
    the messages of a group one after another: in a common group, a receive that is posted early
    would hold up the send that its message depends on. gloo could do with one group.
    """
    groups = {}
    for s, pair in enumerate(pairwise(ranks)):
        groups[s, s + 1] = dist.new_group(pair)
        groups[s + 1, s] = dist.new_group(pair)
    return groups


class Stage:
    """This rank's layers of a model whose stages are on `ranks`, in this order.

    `model` takes [samples, width] and returns as much; the last stage's returns logits. For other
    models, override `compute` and `new_buffer`.
    """

    def __init__(self, model: nn.Module, ranks: Sequence[int], groups: dict[Any, Any]) -> None:
        self.model = model
        self.ranks = ranks
        self.groups = groups
        self.index = ranks.index(dist.get_rank())
        self.is_first = self.index == 0
        self.is_last = self.index == len(ranks) - 1

    def load(self, images: torch.Tensor, labels: torch.Tensor, microbatches: int) -> None:
        """Split images [samples, width] and labels [samples], and post the first receives.

        Sizes of microbatches differ by at most 1. Labels of -100 are ignored.
        """
        self.images = images.tensor_split(microbatches)
        self.labels = labels.tensor_split(microbatches)
        self.targets = int((labels != -100).sum())
        self.loss = 0.0
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.most_held = 0
        self.posted: dict[int, Any] = {}
        self.sent: dict[int, Any] = {}
        if not self.is_first:
            self.post(self.index - 1, 0)
        if not self.is_last:
            self.post(self.index + 1, 0)

    def new_buffer(self, m: int) -> torch.Tensor:
        """Memory for the activations of microbatch `m`, or their gradients."""
        return torch.empty_like(self.images[m])

    def post(self, source: int, m: int) -> None:
        """Post the receive of microbatch `m`, if there is one, from stage `source`."""
        if m < len(self.images):
            group = self.groups[source, self.index]
            buffer = self.new_buffer(m)
            self.posted[source] = buffer, dist.irecv(buffer, self.ranks[source], group)

    def receive(self, source: int, m: int) -> torch.Tensor:
        """Wait for microbatch `m`, and post the receive of the next: it may arrive meanwhile."""
        buffer, request = self.posted.pop(source)
        request.wait()
        self.post(source, m + 1)
        return buffer

    def send(self, target: int, tensor: torch.Tensor) -> None:
        """Send to stage `target` as soon as the tensor before has left; keep it while it leaves."""
        if target in self.sent:
            self.sent[target][1].wait()
        group = self.groups[self.index, target]
        self.sent[target] = tensor, dist.isend(tensor, self.ranks[target], group)

    def forward(self, m: int) -> None:
        """Compute microbatch `m`, and send its activations on or add up the loss.

        What autograd needs for `backward` is held until then.
        """
        inputs = self.images[m]
        if not self.is_first:
            inputs = self.receive(self.index - 1, m).requires_grad_()
        output = self.compute(m, inputs)
        if self.is_last:
            self.loss += output.item()
        else:
            self.send(self.index + 1, output.detach())
        self.held[m] = inputs, output
        self.most_held = max(self.most_held, len(self.held))

    def compute(self, m: int, inputs: torch.Tensor) -> torch.Tensor:
        """The activations of microbatch `m`; in the last stage its part of the mean loss."""
        output = self.model(inputs)
        if self.is_last:
            output = F.cross_entropy(output, self.labels[m], reduction="sum") / self.targets
        return output

    def backward(self, m: int) -> None:
        """Add microbatch `m` to the parameters' gradients, and send its input's gradient back."""
        gradient = None if self.is_last else self.receive(self.index + 1, m)
        inputs, output = self.held.pop(m)
        output.backward(gradient)
        if not self.is_first:
            self.send(self.index - 1, inputs.grad)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for _, request in self.sent.values():
            request.wait()
        self.sent.clear()


def naive(stage: Stage, microbatches: int) -> None:
    """Each microbatch goes forward and back before the next: one stage works, all others wait."""
    for m in range(microbatches):
        stage.forward(m)
        stage.backward(m)


def gpipe(stage: Stage, microbatches: int) -> None:
    """All forward, then all backward: stages work at the same time, and hold all microbatches."""
    for m in range(microbatches):
        stage.forward(m)
    for m in range(microbatches):
        stage.backward(m)


def one_forward_one_backward(stage: Stage, microbatches: int) -> None:
    """As many warm-up microbatches as there are later stages, then forward and backward in turn.

    A stage idles as long as with GPipe, but each backward frees memory before the next forward.
    """
    warm_up = min(microbatches, len(stage.ranks) - 1 - stage.index)
    for m in range(warm_up):
        stage.forward(m)
    for m in range(warm_up, microbatches):
        stage.forward(m)
        stage.backward(m - warm_up)
    for m in range(microbatches - warm_up, microbatches):
        stage.backward(m)


def step(
    stage: Stage, schedule: Any, optimizer: torch.optim.Optimizer,
    images: torch.Tensor, labels: torch.Tensor, microbatches: int,
) -> float:  # fmt: skip
    """A training step. Returns the mean loss, which the last stage alone knows."""
    optimizer.zero_grad()
    stage.load(images, labels, microbatches)
    schedule(stage, microbatches)
    stage.finish()
    optimizer.step()
    return stage.loss


def split(model: nn.Sequential, index: int, stages: int) -> nn.Sequential:
    """The layers of stage `index`. Raises `ValueError` for fewer layers than stages."""
    layers = len(model)
    if layers < stages:
        rule = "each needs one, so choose fewer stages"
        raise ValueError(f"{layers} layers for {stages} stages: {rule}")
    return model[layers * index // stages : layers * (index + 1) // stages]


def run(rank: int, size: int, microbatches: int = 8) -> None:
    """A step by each schedule: what each stage holds, and its gradients beside one process's."""
    torch.manual_seed(1234)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2 * size))).double()
    images = torch.randn(4 * microbatches, 16, dtype=torch.float64)
    labels = torch.randint(16, (4 * microbatches,))
    F.cross_entropy(model(images), labels).backward()
    own = split(model, rank, size)
    groups = new_groups(range(size))
    for schedule in (naive, gpipe, one_forward_one_backward):
        stage = Stage(copy.deepcopy(own), range(size), groups)
        optimizer = torch.optim.SGD(stage.model.parameters(), lr=0.1)
        step(stage, schedule, optimizer, images, labels, microbatches)
        pairs = zip(stage.model.parameters(), own.parameters(), strict=True)
        difference = max((ours.grad - expected.grad).abs().max().item() for ours, expected in pairs)
        print(
            f"{schedule.__name__}, stage {rank}: {stage.most_held} of {microbatches} held, "
            f"{difference:.12f} from one process"
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
