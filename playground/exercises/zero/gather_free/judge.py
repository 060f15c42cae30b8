"""A layer whose weight is gathered for forward and for backward, and freed after both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from playground.exercises.cases import Case, Cases, coded

OUT, EACH = 2, 3
"""Rows of the weight, and elements of a share."""


def cases(rank: int, size: int, seed: int) -> Cases:
    whole = torch.cat([coded(other, OUT * EACH, torch.float32) for other in range(size)]).view(OUT, -1)
    for about, scale in (("weights of 1 to 5", 1.0), ("twice these", 2.0)):
        layer = nn.Linear(whole.shape[1], OUT, bias=False)
        share = scale * whole.flatten().chunk(size)[rank]

        def use(function: Callable[..., Any], layer: nn.Linear = layer, share: torch.Tensor = share) -> object:
            storage = layer.weight.untyped_storage()
            function(torch.distributed.get_rank(), torch.distributed.get_world_size(), layer, share)
            freed = [storage.nbytes()]
            inputs = torch.ones(1, layer.in_features, requires_grad=True)
            output = layer(inputs)
            freed.append(storage.nbytes())
            output.sum().backward()
            return {
                "output": output,
                "gradient of the input": inputs.grad,
                "gradient of the weight": layer.weight.grad,
                "bytes before, between, after": [*freed, storage.nbytes()],
            }

        yield Case(
            about,
            (layer, share),
            returns={
                "output": scale * whole.sum(1)[None],
                "gradient of the input": scale * whole.sum(0)[None],
                "gradient of the weight": torch.ones_like(whole),
                "bytes before, between, after": [0, 0, 0],
            },
            run=use,
        )
