"""Progress of a run: a bar on a terminal, and each epoch's line as soon as it is known."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from playground.runtime.rank import Event
from playground.training.results import Epoch

CLEAR_LINE = "\r\033[2K\033[?25h"  # also brings back the cursor, which click hides while a bar is shown


class TrainingProgress:
    """Takes what rank 0 reports. Use as a context manager, so that no half-drawn bar is left behind."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.bar: Any = None

    def __call__(self, rank: int, event: Event) -> None:
        if rank != 0:
            return
        if "finished" in event:
            self.clear()
            self.say(epoch_text(event["finished"]))
        elif "step" in event and sys.stderr.isatty():
            if self.bar is None:
                label = f"epoch {event['epoch']:2}" if "epoch" in event else "rounds"
                self.bar = click.progressbar(length=event["steps"], label=label, file=sys.stderr)
            self.bar.update(event["step"] - self.bar.pos)

    def clear(self) -> None:
        if self.bar is not None:
            click.echo(CLEAR_LINE, nl=False, err=True)
            self.bar = None

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def epoch_text(epoch: Epoch) -> str:
    """One line per epoch: the loss of all ranks and of each, accuracies, speed."""
    per_rank = " ".join("-" if loss is None else f"{loss:.4f}" for loss in epoch.loss_per_rank)
    return (
        f"epoch {epoch.epoch:2}  train loss {epoch.loss:.4f} (per rank {per_rank})  "
        f"train accuracy {epoch.train_accuracy:.2%}  test accuracy {epoch.test_accuracy:.2%}  "
        f"{epoch.samples_per_second:,.0f} samples/s  {epoch.seconds:.1f} s"
    )
