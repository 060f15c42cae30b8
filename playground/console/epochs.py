"""Training as it goes on: a table with a row for each epoch as soon as it is known, and a bar meanwhile."""

from __future__ import annotations

from playground.console.progress import Bar
from playground.console.session import Session
from playground.console.tables import Column
from playground.runtime.rank import Event
from playground.training.results import Epoch

COLUMNS = (
    Column("epoch", right=True, width=5),
    Column("train\nloss", right=True, width=8),
    Column("train\naccuracy", "%", right=True, width=8),
    Column("test\naccuracy", "%", right=True, width=8),
    Column("speed", "samples/s", right=True, width=11),
    Column("time", "s", right=True, width=7),
    Column("train loss\nof each rank", width=12, wide=True),
)
LEGEND = (
    "train loss, accuracy: means over the epoch's samples, while the model changes; test accuracy: after the epoch, "
    "on all test images; speed, time: training only, without the test"
)


class EpochPrinter:
    """Takes what rank 0 reports of its training. `bar` shows how far the epoch is."""

    def __init__(self, session: Session, bar: Bar) -> None:
        self.session, self.rows, self.bar = session, session.rows(*COLUMNS), bar
        self.shown = 0
        session.say("", LEGEND)

    def __call__(self, rank: int, event: Event) -> None:
        if rank == 0 and "resumed" in event:
            self.session.say("  going on after step {step} of epoch {epoch}".format(**event["resumed"]))
        if rank == 0 and "finished" in event and event["finished"].epoch > self.shown:
            self.shown = event["finished"].epoch  # a world that was restarted may train it again
            self.rows.say(*epoch_cells(event["finished"]))
        self.bar(rank, event)


def epoch_cells(epoch: Epoch) -> list[str]:
    """A cell for each of `COLUMNS`."""
    return [
        str(epoch.epoch),
        f"{epoch.loss:.4f}",
        f"{100 * epoch.train_accuracy:.2f}",
        f"{100 * epoch.test_accuracy:.2f}",
        f"{epoch.samples_per_second:,.0f}",
        f"{epoch.seconds:.1f}",
        "\n".join(
            f"Rank {rank}, epoch {epoch.epoch}: {'-' if loss is None else f'{loss:.4f}'}"
            for rank, loss in enumerate(epoch.loss_per_rank)
        ),
    ]
