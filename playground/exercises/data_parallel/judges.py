"""Judges of the exercises on data_parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from playground.exercises.cases import Case, Cases, gradients
from playground.ui.units import plural

FEATURES, OUTPUTS = 3, 2


def replicas(rank: int, size: int, seed: int) -> Cases:
    """DataParallel's step in one process. The module on the whole batch is the oracle; a hook sees
    each forward's samples, and the memory of its weight."""
    for samples, devices in ((6, 2), (7, 3), (4, 1), (2, 4)):
        torch.manual_seed(seed)
        module = nn.Linear(FEATURES, OUTPUTS)
        whole, batch = copy.deepcopy(module), torch.randn(samples, FEATURES)
        due = whole(batch)
        due.square().mean().backward()
        seen: list[tuple[int, Any]] = []

        def look(
            replica: nn.Linear, inputs: Any, _: object, seen: list[tuple[int, Any]] = seen
        ) -> None:
            seen.append((len(inputs[0]), replica.weight.detach()))

        module.register_forward_hook(look)

        def run(
            function: Callable[..., torch.Tensor],
            module: nn.Module = module,
            batch: torch.Tensor = batch,
            devices: int = devices,
            seen: list[tuple[int, Any]] = seen,
        ) -> object:
            outputs = function(module, batch, devices)
            outputs.square().mean().backward()
            return {
                "outputs": outputs,
                "grad": gradients(module),
                "samples": [length for length, _ in seen],
                "replicas": len({weight.data_ptr() for _, weight in seen}),
            }

        lengths = [len(each) for each in batch.chunk(devices)]
        yield Case(
            f"{plural(samples, 'sample')}, {plural(devices, 'device')}",
            (),
            {
                "outputs": due.detach(),
                "grad": gradients(whole),
                "samples": lengths,
                "replicas": len(lengths),
            },
            is_coded=False,
            run=run,
            gives_rank=False,
        )
