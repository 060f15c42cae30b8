"""A command that trains, watched from outside: undisturbed, and killed again and again.

What is known of it comes from three sources: /proc says which processes it has, its folder of snapshots how far it
has come, its stderr what it makes of the kills.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.launcher.restarts import RESTART
from playground.survival.folder import WHOLE, examine, find_steps
from playground.tools.chaos.processes import CommandProcess, Processes, find_processes, open_process, opened_in
from playground.tools.chaos.results import (
    ENDING,
    LAUNCHER,
    LOADING,
    NO_RANKS,
    RANK,
    SAVING,
    STARTING,
    TRAINING,
    Draws,
    Kill,
    RunRecord,
)

TICK = 0.01
"""Seconds between two looks at the run."""


class Training:
    """One run of the command `words`, with snapshots in `folder`: a context manager that leaves no process behind.
    `steps`: number of steps of the whole training, if known. `restarts`: how many the command may need."""

    def __init__(self, words: tuple[str, ...], folder: Path, *, steps: int = 0, restarts: int = 0) -> None:
        self.words, self.folder, self.steps, self.restarts = words, folder, steps, restarts
        self.record = RunRecord()
        self.processes = Processes(0, None, ())
        self.world: set[int] = set()
        """Ids of the ranks that were started last, those that have ended meanwhile included."""
        self.is_replaced = False
        """Whether others will replace them. (The first to appear may be killed before the second.)"""
        self.step_before = 0
        """Step of the newest whole snapshot when they were started."""
        self.untold: list[Kill] = []
        """Kills of which the command has said nothing yet."""
        self.unrecovered: list[tuple[Kill, set[int]]] = []
        """Kills after which no new ranks have written a snapshot yet, and the ranks of their time."""
        self.began = time.monotonic()
        self.start()

    def start(self) -> None:
        """Start the command, for the first time or again."""
        self.command = CommandProcess(self.words, self.folder, self.restarts)
        self.record.starts += 1

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exception: object) -> None:
        self.command.end()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def watch(self, act: Callable[[], None] = lambda: None) -> RunRecord:
        """Look at the run until it ends by itself; call `act` after each look."""
        while (code := self.command.poll()) is None or self.was_killed(code):
            if code is not None:
                self.start_again()
            self.look()
            self.hear(TICK)
            act()
        self.look()
        self.hear(0)
        self.record.seconds, self.record.code = self.elapsed, code
        return self.record

    def was_killed(self, code: int) -> bool:
        """Whether the launcher has ended by our hand."""
        return code == -signal.SIGKILL and bool(self.record.kills) and self.record.kills[-1].role == LAUNCHER

    def start_again(self) -> None:
        self.hear(0)
        self.untold.clear()
        self.command.end()
        self.is_replaced = True
        self.start()

    def look(self) -> None:
        """Find the processes there are, and what has been written."""
        self.processes = find_processes(self.command.pid)
        self.record.last_step = self.newest_whole()
        ranks = set(self.processes.ranks)
        if self.world.isdisjoint(ranks):
            self.hear(0)  # a failure is reported before the next ranks are started
            if ranks and self.is_replaced:
                self.world, self.step_before, self.is_replaced = set(), self.record.last_step, False
                self.untold.clear()
        self.world |= ranks
        if self.world and not self.record.ranks_after:
            self.record.ranks_after = self.elapsed
        if self.has_saved:
            self.note_recovery()

    def newest_whole(self) -> int:
        """The step of the newest whole snapshot, by manifests and lengths."""
        for step in find_steps(self.folder):
            if step <= self.record.last_step:
                break
            if examine(self.folder, step, read_contents=False).condition == WHOLE:
                return step
        return self.record.last_step

    @property
    def has_saved(self) -> bool:
        """Whether the ranks that were started last have written a snapshot."""
        return bool(self.world) and self.record.last_step > self.step_before

    def note_recovery(self) -> None:
        """The ranks that were started last have written a snapshot: kills of ranks before them are overcome."""
        if not self.record.first_snapshot_after:
            self.record.first_snapshot_after = self.elapsed
        for kill, ranks in self.unrecovered:
            if self.world.isdisjoint(ranks):
                kill.seconds = self.elapsed - kill.at
        self.unrecovered = [(kill, ranks) for kill, ranks in self.unrecovered if kill.seconds is None]

    def hear(self, seconds: float) -> None:
        """Read what the command says; wait at most `seconds` for any of it."""
        for line in self.command.read_lines(seconds):
            failure, restart, _ = line.partition(RESTART)
            if not restart:
                self.record.notices.append(line)
            elif not self.untold:
                self.record.unexplained.append(line)
            for kill in self.untold if restart else ():
                kill.said = failure
            self.untold = [] if restart else self.untold
            self.is_replaced = self.is_replaced or bool(restart)

    def kill(self, role: str, pid: int) -> bool:
        """Kill one of the processes of the last look; False if it has ended by itself since."""
        pidfd = open_process(pid, role, self.command.pid)
        if pidfd is None:
            return False
        try:
            phase = self.find_phase([pid] if role == RANK else [*self.processes.ranks])
            kill = Kill(role=role, pid=pid, at=self.elapsed, phase=phase, step=self.record.last_step)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        self.record.kills.append(kill)
        self.untold.append(kill)
        self.unrecovered.append((kill, {*self.world}))
        return True

    def find_phase(self, ranks: list[int]) -> str:
        """The phase that these ranks are in."""
        if not ranks:
            return NO_RANKS
        if self.steps and self.record.last_step >= self.steps:
            return ENDING
        opened = [access for rank in ranks for access in opened_in(self.folder, rank)]
        if opened:
            return SAVING if os.O_WRONLY in opened or os.O_DIRECTORY in opened else LOADING
        return TRAINING if self.has_saved else STARTING


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
    """Kills one process of a training after the other. The time between two kills depends on the duration of the
    undisturbed run, and on the work that is left: so the kills spread over the whole run."""

    def __init__(
        self, training: Training, undisturbed: RunRecord, draws: Draws, kills: int, show: Callable[[int], None]
    ) -> None:
        self.training, self.undisturbed, self.draws, self.kills, self.show = training, undisturbed, draws, kills, show
        self.choose_next()

    def choose_next(self) -> None:
        self.role = self.draws.role()
        self.due: float | None = None
        """Time of the next kill; None until there is a process of that role."""

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
        """Seconds until the next of the `kills` that are left."""
        whole, record = self.undisturbed, self.training.record
        starting = whole.first_snapshot_after - (whole.ranks_after if self.role == RANK else 0)
        left = 1 - record.last_step / whole.last_step
        return self.draws.delay(starting, (whole.seconds - whole.first_snapshot_after) * left / (kills + 1))
