"""Replicas begin equal: parameters, frozen ones too, and buffers come from rank 0."""

from __future__ import annotations

from collections.abc import Iterator

from playground.exercises.cases import Case
from playground.exercises.exercise import DEADLOCK, Exercise, Mistake

ALL = "[*model.parameters(), *model.buffers()]"
BROADCAST = f"    for tensor in {ALL}:\n        dist.broadcast(tensor.data, src=0)\n"
SEEDS = """\
    import torch
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
"""
OWN = "what rank 0 had"
EXERCISE = Exercise(
    module=__name__,
    number=20,
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
    ),
)


def cases(rank: int, size: int, seed: int) -> Iterator[Case]:
    import torch
    from torch import nn

    for is_frozen in (False, True):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).requires_grad_(not is_frozen))
        model.register_buffer("scale", torch.ones(2), persistent=False)
        about = f"BatchNorm between two layers{', the last one frozen' * is_frozen}"
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        due = {name: torch.full_like(tensor, place) for place, (name, tensor) in enumerate(tensors.items(), 1)}
        for name, tensor in tensors.items():
            tensor.data.copy_(due[name] * 10**rank)

        def look(tensors: dict[str, torch.Tensor] = tensors, due: dict[str, torch.Tensor] = due) -> dict[str, object]:
            """The tensors; only a remark if they hold numbers that no rank had: which ones does not matter then."""
            given = [sum(tensor == due[name] * 10**other for other in range(size)) for name, tensor in tensors.items()]
            return {"model": OWN, **tensors} if all(each.all() for each in given) else {"model": "what no rank had"}

        yield Case(about, (model,), held=look, expected={"model": OWN, **due})
