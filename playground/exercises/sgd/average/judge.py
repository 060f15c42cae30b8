"""average_gradients of the tutorials, for parameters that not every rank has used, too."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, coded
from playground.exercises.exercise import DEADLOCK, Exercise, Mistake

AVERAGE = "param.grad /= size"
EXERCISE = Exercise(
    mistakes=(
        Mistake("forgets to divide", {AVERAGE: "pass"}, "all_reduce leaves the sum"),
        Mistake("divides twice", {AVERAGE: "param.grad /= size * size"}),
        Mistake(
            "averages parameters",
            {"dist.all_reduce(param.grad)": "dist.all_reduce(param.data)", AVERAGE: "param.data /= size"},
            "the gradients stay as they were",
        ),
        Mistake(
            "skips None on some ranks",
            {"param.grad = torch.zeros_like(param)": "continue"},
            "the others wait in all_reduce for a rank that does not come",
            DEADLOCK,
        ),
    )
)


def cases(rank: int, size: int, seed: int) -> Cases:
    from torch import nn

    for about, unused in (("all used", False), ("odd ranks have no gradient of the last parameter", True)):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        params = [*model.parameters()]
        for param in params:
            param.data.add_(rank)  # averaging them would show
        before = [param.detach().clone() for param in params]
        everyones = [
            [coded(other, param.numel(), param.dtype).view_as(param) for param in params] for other in range(size)
        ]
        for gradients in everyones[1::2] if unused else []:
            gradients[-1].zero_()
        for param, gradient in zip(params, everyones[rank], strict=True):
            param.grad = gradient.clone()
        if unused and rank % 2:
            params[-1].grad = None
        mean = [sum(each) / size for each in zip(*everyones, strict=True)]
        yield Case(
            about,
            (model,),
            held=lambda params=params: {"grad": [param.grad for param in params], "parameter": params},
            expected={"grad": mean, "parameter": before},
            is_coded=False,
        )
