"""The order of 1F1B: what a stage keeps is bounded by its place, and no stage waits for one that waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import DEADLOCK, ERROR, Exercise, Mistake

if TYPE_CHECKING:
    import torch

    from playground.exercises.pipeline.stages import Pipeline

AHEAD = "min(microbatches, size - 1 - rank)"
EXERCISE = Exercise(
    preload=("torch.fx.experimental.symbolic_shapes",),  # which a backward from a given gradient imports
    mistakes=(
        Mistake("keeps all activations", {AHEAD: "microbatches"}, "that is GPipe: backward may begin earlier"),
        Mistake(
            "warm-up too long", {AHEAD: "min(microbatches, size - rank)"}, "one more microbatch is kept than need be"
        ),
        Mistake(
            "warm-up too short",
            {AHEAD: "min(microbatches, max(0, size - 2 - rank))"},
            "the stages behind wait for this one",
        ),
        Mistake(
            "warm-up counted from the wrong end",
            {AHEAD: "min(microbatches, rank)"},
            "the stage behind needs more microbatches before the first gradient comes back",
            DEADLOCK,
        ),
        Mistake(
            "leaves out the last backwards",
            {"range(microbatches - ahead, microbatches)": "[]"},
            "those of the warm-up's microbatches are left at the end",
            DEADLOCK,
        ),
        Mistake(
            "needs as many microbatches as stages",
            {AHEAD: "size - 1 - rank"},
            "there is not always one to go forward with in the warm-up",
            ERROR,
        ),
    ),
)


class Stage:
    """Forward and backward of one rank's stage, with their messages; the order of the calls is kept."""

    def __init__(self, rank: int, size: int, mine: Pipeline) -> None:
        self.mine, self.before, self.behind = mine, rank - 1, (rank + 1) % size
        self.order: list[str] = []
        self.sending: list[torch.distributed.Work] = []
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, m: int) -> None:
        import torch.distributed as dist
        import torch.nn.functional as F

        self.order.append(f"F{m}")
        if not 0 <= m < len(self.mine.inputs):
            raise IndexError(f"forward({m}): there are {len(self.mine.inputs)} microbatches")
        features = self.mine.inputs[m]
        if self.before >= 0:
            dist.recv(features, self.before)
            features.requires_grad_()
        output = self.mine.stage(features)
        if self.behind:
            self.sending.append(dist.isend(output.detach(), self.behind))
        else:
            output = F.mse_loss(output, self.mine.targets[m]) / len(self.mine.inputs)
        self.held[m] = features, output

    def backward(self, m: int) -> None:
        import torch
        import torch.distributed as dist

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
    from playground.exercises.pipeline.stages import new_pipeline

    for microbatches in (4, 2, 1):
        mine = new_pipeline(rank, size, seed, microbatches)
        stage = Stage(rank, size, mine)
        order, forwards, backwards = list[str](), 0, 0
        while backwards < microbatches:  # forward, while there is room for its activations
            if forwards < microbatches and forwards - backwards < size - rank:
                order.append(f"F{forwards}")
                forwards += 1
            else:
                order.append(f"B{backwards}")
                backwards += 1
        yield Case(
            f"{microbatches} microbatch{'es' * (microbatches > 1)}",
            (stage, microbatches),
            held=lambda stage=stage: {
                "order": stage.order,
                "grad": [param.grad for param in stage.mine.stage.parameters()],
            },
            expected={"order": order, "grad": mine.gradients},
            is_coded=False,
        )
