"""Replicas begin equal: parameters, frozen ones too, and buffers come from rank 0."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import DEADLOCK, Exercise, Mistake

if TYPE_CHECKING:
    import torch
    from torch import nn

ALL = "[*model.parameters(), *model.buffers()]"
BROADCAST = f"    for tensor in {ALL}:\n        dist.broadcast(tensor.data, src=0)\n"
SEEDS = """\
    import torch
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
"""
OWN, OTHERS = "what rank 0 had", "other tensors than before"
EXERCISE = Exercise(
    mistakes=(
        Mistake("buffers are forgotten", {ALL: "model.parameters()"}, "BatchNorm's statistics differ between ranks"),
        Mistake("parameters are forgotten", {ALL: "model.buffers()"}),
        Mistake("by state_dict", {ALL: "model.state_dict().values()"}, "it lacks buffers with persistent=False"),
        Mistake(
            "seeds instead of a broadcast",
            {BROADCAST: SEEDS},
            "all ranks draw the same weights, but rank 0's own are lost",
        ),
        Mistake(
            "frozen parameters are left out",
            {ALL: "[*(each for each in model.parameters() if each.requires_grad), *model.buffers()]"},
            "they take part in forward as all others do",
        ),
        Mistake(
            "broadcasts a copy",
            {"dist.broadcast(tensor.data": "dist.broadcast(tensor.detach().clone()"},
            "what arrives in it never gets into the model",
        ),
        Mistake(
            "rank 0 alone calls it",
            {BROADCAST: f"    if rank:\n        return\n{BROADCAST}"},
            "those who are to receive have to call broadcast, too",
            DEADLOCK,
        ),
    )
)


def cases(rank: int, size: int, seed: int) -> Cases:
    import torch
    from torch import nn

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
