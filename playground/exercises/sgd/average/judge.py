"""average_gradients of the tutorials, for parameters that not every rank has used, too."""

from __future__ import annotations

from torch import nn

from playground.exercises.cases import Case, Cases, coded, gradients


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, unused in (("all used", False), ("odd ranks have no gradient of the last parameter", True)):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        params = [*model.parameters()]
        for param in params:
            param.data.add_(rank)  # averaging them would show
        before = [param.detach().clone() for param in params]
        everyones = [[coded(other, each.numel(), each.dtype).view_as(each) for each in params] for other in range(size)]
        for others in everyones[1::2] if unused else []:
            others[-1].zero_()
        for param, gradient in zip(params, everyones[rank], strict=True):
            param.grad = gradient.clone()
        if unused and rank % 2:
            params[-1].grad = None
        yield Case(
            about,
            (model,),
            held=lambda model=model: {"grad": gradients(model), "parameter": [*model.parameters()]},
            expected={"grad": [sum(each) / size for each in zip(*everyones, strict=True)], "parameter": before},
            is_coded=False,
        )
