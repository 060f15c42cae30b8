"""The losses of a training run, of all ranks together, and its speed."""

from __future__ import annotations

import time
from statistics import fmean

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch.distributed as dist
from torch import nn

from playground.lessons.bert.page import LOSSES_TO_COMPARE, BertSettings
from playground.measurement import Fields
from playground.measurement.interleave import Heartbeat
from playground.runtime import report, synchronize
from playground.training.replicas import find_largest_difference


class StepLosses:
    """Counts the steps of a training loop. Ranks exchange messages for it only when a report is due."""

    def __init__(self, settings: BertSettings) -> None:
        self.settings = settings
        self.own: list[torch.Tensor] = []
        """This rank's losses since the last report."""
        self.losses: list[float] = []
        """Those of all ranks together, up to then."""
        self.started = self.reported = self.now()
        self.heartbeat = Heartbeat()

    def now(self) -> float:
        """Seconds on this rank's clock, when its device has done all that it was given."""
        synchronize()
        return time.monotonic()

    def add(self, loss: torch.Tensor) -> None:
        """Count a step: this rank's part of its mean loss. When a report is due, average the losses since the last one
        over the ranks, and report the mean of the last `LOSSES_TO_COMPARE` steps, or of all if there were fewer, and
        the speed since then."""
        self.own.append(loss.detach())
        step = len(self.losses) + len(self.own)
        if step % self.settings.report_every == 0 or step == self.settings.steps:
            own = torch.stack(self.own).double()
            dist.all_reduce(own)
            self.losses += (own / dist.get_world_size()).tolist()
            now, loss = self.now(), fmean(self.losses[-LOSSES_TO_COMPARE:])
            speed = len(own) * self.settings.batch_size / (now - self.reported)
            self.own, self.reported = [], now
            report(progress={"way": self.settings.way, "step": step, "loss": loss, "speed": speed})
        self.heartbeat.beat(phase=f"training: {self.settings.way}", step=step, steps=self.settings.steps)

    def result(self, model: nn.Module, right: float, tested: int) -> Fields:
        """The whole training: every loss, the share of test pairs that are right, seconds of training alone, and the
        largest difference between replicas. All ranks must call this, and get the same."""
        seconds = self.reported - self.started
        return {
            "way": self.settings.way, "workers": self.settings.workers, "losses": self.losses,
            "test_accuracy": right / tested, "tested": tested, "seconds": seconds,
            "samples_per_second": self.settings.steps * self.settings.batch_size / seconds,
            "replicas_max_difference": find_largest_difference(model)[0],
        }  # fmt: skip
