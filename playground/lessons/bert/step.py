"""A training step by one of the ways, to be taken as often as it is to be measured."""

from __future__ import annotations

from functools import partial

import torch

from playground.lessons.bert.lesson import WAYS, batches
from playground.lessons.bert.settings import DDP, BertSettings
from playground.runtime import device
from playground.training.sentence_pairs.pairs import PairBatch
from playground.training.step import Moment, training_step
from playground.training.sync import GradSync


class Step:
    """Called, it takes a step on this rank's part of the next batch."""

    def __init__(self, rank: int, size: int, settings: BertSettings) -> None:
        torch.set_num_threads(settings.threads)
        self.model, self.loss = WAYS[settings.way](settings)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.lr, fused=True)
        self.coming = batches(settings, rank, size)

    def __call__(self) -> None:
        self.take(next(self.coming))

    def take(self, batch: PairBatch, moment: Moment = lambda name: None) -> None:
        """A step on that batch."""
        training_step(self.optimizer, [partial(self.loss, batch)], GradSync(self.model), moment=moment)


def devices_of(settings: BertSettings) -> list[torch.device]:
    """The devices of this process, numbered, as accounts of memory want them."""
    if settings.way == DDP:
        return [torch.device(device().type, device().index or 0)]
    return [torch.device(name) for name in settings.devices]
