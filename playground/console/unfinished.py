"""The JSON document of a training run that ended before its time: the epochs that were finished by then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from playground.console.session import Session
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.rank import Event
from playground.runtime.signals import stopping_signal
from playground.training.results import Epoch


class FinishedEpochs:
    """Keeps every epoch that rank 0 reports as finished: `keep` is to hear of all reports."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []

    def keep(self, rank: int, event: Event) -> None:
        """Take a report, as `World.run` hands it on."""
        if rank == 0 and "finished" in event:
            epoch: Epoch = event["finished"]
            self.epochs = [*self.epochs[: epoch.epoch - 1], epoch]  # one that was restarted may report it again

    @contextlib.contextmanager
    def printed_if_stopped(self, session: Session, **about: object) -> Iterator[None]:
        """Whatever ends the training in here, Ctrl-C, SIGTERM or a rank that failed, goes on its way after the document
        has been printed: the epochs so far, `complete` false, and `stopped_by`, the signal or what the rank did.

        `about`: further fields of the document.
        """
        try:
            yield
        except UsageError:  # nothing was trained
            raise
        except (PlaygroundError, KeyboardInterrupt, SystemExit) as error:
            best = max(self.epochs, key=lambda epoch: epoch.test_accuracy, default=None)
            session.print_document(
                {}, **about, best=best, epochs=self.epochs, complete=False, stopped_by=describe_stop(error)
            )
            raise


def describe_stop(error: BaseException) -> str:
    """What ended a run, in a few words: a signal by name, or the first line of an error."""
    number = stopping_signal(error)
    return number.name if number else str(error).partition("\n")[0]
