"""Judges of the exercises on data_parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from playground.exercises.cases import Case, Cases, gradients
from playground.ui.units import plural

FEATURES, OUTPUTS = 3, 2


class Forward(NamedTuple):
    """A forward pass of a replica."""

    samples: int
    weight: torch.Tensor


def replicas(rank: int, size: int, seed: int) -> Cases:
    """DataParallel's step in one process. The module on the whole batch is the oracle; a hook sees
    each forward's samples, and the memory of its weight."""
    for samples, devices in ((6, 2), (7, 3), (4, 1), (2, 4)):
        torch.manual_seed(seed)
        module = nn.Linear(FEATURES, OUTPUTS)
        whole, batch = copy.deepcopy(module), torch.randn(samples, FEATURES)
        due = whole(batch)
        due.square().mean().backward()
        seen: list[Forward] = []
        module.register_forward_hook(partial(look, seen))
        lengths = [len(each) for each in batch.chunk(devices)]
        yield Case(
            f"{plural(samples, 'sample')}, {plural(devices, 'device')}",
            (),
            {
                "outputs": due.detach(),
                "grad": gradients(whole),
                "samples of replica": lengths,
                "replicas": len(lengths),
            },
            is_coded=False,
            run=partial(step, module, batch, devices, seen),
            gives_rank=False,
        )


def look(seen: list[Forward], replica: nn.Linear, inputs: Any, output: object) -> None:
    """A hook of the module, which its replicas have, too. `seen`: forward passes so far."""
    seen.append(Forward(len(inputs[0]), replica.weight.detach()))


def step(
    module: nn.Module, batch: torch.Tensor, devices: int, seen: list[Forward],
    function: Callable[..., torch.Tensor],
) -> dict[str, object]:  # fmt: skip
    outputs = function(module, batch, devices)
    outputs.square().mean().backward()
    return {
        "outputs": outputs,
        "grad": gradients(module),
        "samples of replica": [each.samples for each in seen],
        "replicas": len({each.weight.data_ptr() for each in seen}),
    }
