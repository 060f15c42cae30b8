"""The gradient of the whole batch, held against one process that has all samples."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn
from torch.nn.functional import mse_loss

from playground.exercises.cases import UNEVEN, Case, Cases, gradients

FEATURES, OUTPUTS = 3, 2


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, samples in (UNEVEN | {"none on rank 0": (0, 4, 0, 3, 1)}).items():
        if not any(samples[:size]):
            continue
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randint(-3, 4, shape, generator=generator).float()

        everyones = [(draw(number, FEATURES), draw(number, OUTPUTS)) for number in samples[:size]]
        model = nn.Linear(FEATURES, OUTPUTS)
        model.weight.data.copy_(draw(OUTPUTS, FEATURES))
        model.bias.data.fill_(1)
        alone = copy.deepcopy(model).double()
        all_inputs, all_targets = (torch.cat(tensors).double() for tensors in zip(*everyones, strict=True))
        mse_loss(alone(all_inputs), all_targets).backward()
        due = gradients(alone.float())
        yield Case(about, (model, *everyones[rank]), held=partial(gradients, model), expected=due, is_coded=False)
