"""The same command twice: nobody disturbs it, and it is killed again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from playground.runtime.errors import PlaygroundError, UsageError
from playground.tools.chaos.results import RANK, Draws, RunRecord
from playground.tools.chaos.training import Training


def train_undisturbed(words: tuple[str, ...], folder: Path) -> RunRecord:
    """Run the command to its end. Raises `UsageError` or `PlaygroundError` with what it said, if it fails."""
    with Training(words, folder) as training:
        record = training.watch()
    if record.code:
        said = (record.notices or [f"exit code {record.code}"])[-1].removeprefix("playground: ")
        raise (UsageError if record.code == UsageError.exit_code else PlaygroundError)(f"{words[0]}: {said}")
    return record


def train_with_kills(
    words: tuple[str, ...], folder: Path, undisturbed: RunRecord, draws: Draws, kills: int, show: Callable[[int], None]
) -> RunRecord:
    """Run the command to its end, and kill processes of it until then, `kills` times at most. `show` is told the number
    of those that have happened."""
    with Training(words, folder, steps=undisturbed.last_step, restarts=kills) as training:
        killer = Killer(training, undisturbed, draws, kills, show)
        return training.watch(killer.kill_if_due)


class Killer:
    """Kills one process of a training after the other. How long it waits depends on how long the run took that nobody
    disturbed, and on how much is left to do: so the kills spread over the whole run."""

    def __init__(
        self, training: Training, undisturbed: RunRecord, draws: Draws, kills: int, show: Callable[[int], None]
    ) -> None:
        self.training, self.undisturbed, self.draws, self.kills, self.show = training, undisturbed, draws, kills, show
        self.choose_next()

    def choose_next(self) -> None:
        self.role = self.draws.role()
        self.due: float | None = None
        """When the next kill is to come; None until there is a process of that role."""

    def kill_if_due(self) -> None:
        """To be called again and again."""
        done = len(self.training.record.kills)
        targets = self.training.processes.of_role(self.role)
        if done == self.kills or not targets:
            return
        if self.due is None:
            self.due = time.monotonic() + self.draw_delay(self.kills - done)
        elif time.monotonic() >= self.due and self.training.kill(self.role, self.draws.process(targets)):
            self.choose_next()
            self.show(done + 1)

    def draw_delay(self, kills: int) -> float:
        """Seconds until the next of so many kills that are left."""
        whole, record = self.undisturbed, self.training.record
        starting = whole.first_snapshot_after - (whole.ranks_after if self.role == RANK else 0)
        left = 1 - record.last_step / whole.last_step
        return self.draws.delay(starting, (whole.seconds - whole.first_snapshot_after) * left / (kills + 1))
