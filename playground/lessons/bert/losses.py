"""The losses of a training run, of all ranks together, and its speed."""

from __future__ import annotations

import time

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch.distributed as dist

from playground.lessons.bert.page import BertSettings
from playground.measurement import Fields
from playground.measurement.interleave import Heartbeat
from playground.runtime import synchronize


class StepLosses:
    """The steps of a training loop, from its construction on."""

    def __init__(self, settings: BertSettings) -> None:
        self.settings, self.heartbeat = settings, Heartbeat()
        self.own: list[torch.Tensor] = []
        """This rank's part of the mean loss of each step."""
        synchronize()
        self.started = time.monotonic()

    def add(self, loss: torch.Tensor) -> None:
        self.own.append(loss.detach())
        self.heartbeat.beat(phase=f"training: {self.settings.way}", step=len(self.own), steps=self.settings.steps)

    def mean(self) -> list[float]:
        """The loss of each step, over all ranks. All must call this, and get the same."""
        losses = torch.stack(self.own).double()
        dist.all_reduce(losses)
        return (losses / dist.get_world_size()).tolist()

    def result(self) -> Fields:
        """The whole training: every loss, and the seconds that it took. All ranks must call this."""
        losses = self.mean()  # reading them waits for the device
        seconds = time.monotonic() - self.started
        speed = self.settings.steps * self.settings.batch_size / seconds
        about = {"way": self.settings.way, "workers": self.settings.workers}
        return {**about, "losses": losses, "seconds": seconds, "samples_per_second": speed}
