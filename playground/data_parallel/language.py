"""What the lesson trains: a language model, small inside, with an output that is not; and three ways to its loss.

Every sample gives a number for each word of the vocabulary at each of its places: these logits are what should not
come together on one device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from playground.data_parallel.criterion import DataParallelCriterion, DataParallelModel, LossModel, weighted_mean
from playground.data_parallel.memory import Account
from playground.data_parallel.module import data_parallel
from playground.data_parallel.moves import copied
from playground.data_parallel.scatter import chunk_sizes

VOCABULARY, WIDTH, LENGTH = 30_000, 32, 8
"""Words there are, features of a word, words in a sample."""
LR = 0.1


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


def task(batch: int, device: torch.device) -> tuple[LanguageModel, torch.Tensor, torch.Tensor]:
    """A new model on `device`, and, in the host's memory, a batch of tokens [batch, length] and targets alike."""
    tokens = torch.randint(VOCABULARY, (batch, LENGTH + 1))
    return LanguageModel().to(device), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def optimizer_of(
    model: nn.Module, account: Account | None = None, device: torch.device | None = None
) -> torch.optim.Optimizer:
    """Plain SGD. With an `account`, the model is put on `device` there."""
    model.zero_grad()
    if account and device:
        account.put(*model.parameters(), *model.buffers(), device=device)
    return torch.optim.SGD(model.parameters(), lr=LR)


def train_step(
    loss_of: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
    model: nn.Module,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    optimizer: torch.optim.Optimizer,
) -> float:
    """One step on one batch: the loss before it."""
    optimizer.zero_grad()
    loss = loss_of(model, tokens, targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def loss_by(
    way: str, devices: list[torch.device], output: torch.device
) -> Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(model, tokens, targets) → the mean loss over the batch on `output`, by the way named after what is gathered.

    "logits", "loss", or "outputs", which are not gathered but stay where they are.
    """

    def logits(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return TokenLoss()(data_parallel(model, tokens, devices, output), copied("targets", targets, output))

    def loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = data_parallel(LossModel(model, TokenLoss()), (tokens, targets), devices, output)
        return weighted_mean(losses, chunk_sizes(len(tokens), len(devices)))

    def outputs(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        criterion = DataParallelCriterion(TokenLoss(), devices, output)
        return criterion(DataParallelModel(model, devices)(tokens), targets)

    return {"logits": logits, "loss": loss, "outputs": outputs}[way]
