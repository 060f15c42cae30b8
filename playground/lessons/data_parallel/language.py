"""What the lesson trains: a language model, small inside, with an output that is not.

Every sample gives a number for each word of the vocabulary at each of its places: these logits are what should not
come together on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from playground.training.step import training_step
from playground.training.sync import GradSync

VOCABULARY, WIDTH, LENGTH = 30_000, 32, 8
"""Words there are, features of a word, words in a sample."""
LR = {"sgd": 0.1, "adam": 1e-3}


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
    """A new model on `device` and, in the host's memory, tokens and targets, both [batch_size, length].

    The same for the same seed, whichever the device.
    """
    torch.manual_seed(seed)
    tokens, targets = new_batch(batch_size)
    return LanguageModel().to(device), tokens, targets


def new_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and, as targets, the tokens after them, both [batch_size, length]."""
    tokens = torch.randint(VOCABULARY, (batch_size, LENGTH + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def new_optimizer(model: nn.Module, name: str = "sgd") -> torch.optim.Optimizer:
    """Plain SGD, which keeps nothing but the parameters, or Adam: a name of `OPTIMIZERS`."""
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    return kind(model.parameters(), lr=LR[name])


def new_step(model: nn.Module, loss: Callable[[], torch.Tensor], sync: GradSync) -> Callable[[], torch.Tensor]:
    """A call that takes one training step of `model` by SGD and returns the loss before it."""
    return partial(training_step, new_optimizer(model), [loss], sync)
