"""The language model that the lesson trains, and the ways to its loss: small inside, it has an
output that is not.

Every sample gives a number for each word of the vocabulary at each of its places: these logits are
what should not come together on one device. Two ways do without, and the mean that is right for
unequal chunks is a weighted one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from playground.lessons.data_parallel.lesson import ParallelLossModel, chunk_sizes, weighted_mean
from playground.lessons.data_parallel.machine import (
    DataParallel,
    copy_to,
    gather,
    parallel_apply,
    replicate,
    scatter,
)

VOCABULARY, WIDTH, LENGTH = 30_000, 32, 8
"""Words there are, features of a word, words in a sample."""


class LanguageModel(nn.Module):
    """Tokens [batch, length] → logits [batch, length, vocabulary]. 1,951,056 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(self.embedding(tokens))))


class TokenLoss(nn.Module):
    """Cross entropy, the mean over every token of every sample."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def new_model_and_batch(
    batch_size: int, seed: int, device: torch.device
) -> tuple[LanguageModel, torch.Tensor, torch.Tensor]:
    """A new model on `device` and, in the host's memory, tokens and, as targets, the tokens after
    them, both [batch_size, length]. The same for the same seed, whichever the device."""
    torch.manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (batch_size, LENGTH + 1))
    return LanguageModel().to(device), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD, which keeps nothing but the parameters."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


class DataParallelModel(DataParallel):
    """DataParallel that gathers nothing: forward gives a list, each replica's output where it was
    made.

    Idea: https://hangzhang.org/PyTorch-Encoding/parallel.html
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> list[Any]:
        return self.run_replicas(inputs, kwargs)


class DataParallelCriterion(DataParallel):
    """A criterion as the module: `module(output, target)` in parallel, on what `DataParallelModel`
    left on the devices.

    The targets are cut as the inputs were. A criterion with `reduction` "mean" (taken for granted
    if it has none) must mean the average over samples that weigh the same: with class weights or
    ignored targets, take "sum" and divide.
    """

    def forward(self, outputs: list[Any], targets: torch.Tensor) -> torch.Tensor:
        chunks = scatter(targets, self.devices, self.dim)
        used, pairs = self.devices[: len(chunks)], list(zip(outputs, chunks, strict=True))
        parts = parallel_apply(replicate(self.module, used), pairs, None, used)
        losses = gather(parts, self.output_device, self.dim)
        reduction = getattr(self.module, "reduction", "mean")
        if reduction == "mean":
            return weighted_mean(losses, [chunk.shape[self.dim] for chunk in chunks])
        return losses.sum() if reduction == "sum" else losses


Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and targets, [samples, length]."""


def gather_logits(
    model: nn.Module, batch: Batch, devices: list[torch.device], output: torch.device
) -> torch.Tensor:
    """As DataParallel is mostly used: all logits come together on one device, and the loss is
    computed there."""
    tokens, targets = batch
    logits = DataParallel(model, devices, output)(tokens)
    return TokenLoss()(logits, copy_to(targets, output, "targets"))


def gather_losses(
    model: nn.Module, batch: Batch, devices: list[torch.device], output: torch.device
) -> torch.Tensor:
    """A cure: each replica computes its loss in forward, and only the losses are gathered, one
    number per replica."""
    losses = DataParallel(ParallelLossModel(model, TokenLoss()), devices, output)(*batch)
    return weighted_mean(losses, chunk_sizes(len(batch[0]), len(devices)))


def keep_outputs(
    model: nn.Module, batch: Batch, devices: list[torch.device], output: torch.device
) -> torch.Tensor:
    """A cure that leaves the model as it is: outputs stay where they are, and the criterion runs in
    parallel too."""
    tokens, targets = batch
    outputs = DataParallelModel(model, devices)(tokens)
    return DataParallelCriterion(TokenLoss(), devices, output)(outputs, targets)


LOSSES = {"logits": gather_logits, "loss": gather_losses, "outputs": keep_outputs}
"""Every way to the mean loss over the batch, on the output device; named after what is gathered, or
is not."""
