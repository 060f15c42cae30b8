"""Replicas begin equal: parameters, frozen ones too, and buffers come from rank 0."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from playground.exercises.cases import Case, Cases

OWN, OTHERS = "what rank 0 had", "other tensors than before"


def cases(rank: int, size: int, seed: int) -> Cases:
    for is_frozen in (False, True):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).requires_grad_(not is_frozen))
        model.register_buffer("scale", torch.ones(2), persistent=False)
        about = f"BatchNorm between two layers{', the last one frozen' * is_frozen}"
        tensors, due = name_tensors(model), dict[str, torch.Tensor]()
        for place, (name, tensor) in enumerate(tensors.items(), 1):  # the frozen one's are more than float16 can hold
            due[name] = torch.full_like(tensor, place + is_frozen * (1 / 3 if tensor.is_floating_point() else 4096))
            tensor.data.copy_(due[name] * 10**rank)
        held = partial(look, model, tensors, due, size)
        yield Case(about, (model,), held=held, expected={"": OWN, **due})


def name_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def look(
    model: nn.Module, tensors: dict[str, torch.Tensor], due: dict[str, torch.Tensor], size: int
) -> dict[str, object]:
    """The tensors; only a remark if the model has others now, or what no rank had: which ones does not matter."""
    if any(each is not tensors.get(name) for name, each in name_tensors(model).items()):
        return {"": OTHERS}
    given = {name: sum(tensor == due[name] * 10**other for other in range(size)) for name, tensor in tensors.items()}
    new = [name for name, each in given.items() if not each.all()]
    return {"": f"in {len(new)} of {len(tensors)} tensors what no rank had"} if new else {"": OWN, **tensors}
