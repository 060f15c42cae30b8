"""In a rank: watches its program, and writes what it sees into the rank's log.

Nothing of the program is changed, and nothing is called that other ranks would hear of. Where this
fails, it stops, and the program goes on: the rank is unknown then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from playground.explain.right.calls_seen import CallWatcher, OutsideWatcher
from playground.explain.right.data_seen import DataWatcher
from playground.explain.right.files_seen import FileWatcher
from playground.explain.right.log import ENDED, FAILED, RACES, file_name
from playground.explain.right.training_seen import Between, TrainingWatcher
from playground.explain.right.watcher import Notes, RankLog
from playground.tap import observing
from playground.world.simulated_gpu.races import count_races

_notes: list[Notes] = []
"""Those of this process, if any."""


@contextlib.contextmanager
def checked(folder: Path, rank: int) -> Iterator[None]:
    """In this block, see what this rank does, and write it into a log in `folder`. Where there is
    no room for that, nothing is seen."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        notes = Notes(RankLog(folder / file_name(rank)))
    except OSError:
        yield
        return
    _notes[:] = [notes]
    training = TrainingWatcher(notes)
    calls = (Between(training), CallWatcher(notes))
    state = FAILED
    try:
        with contextlib.ExitStack() as watching:
            for each in (training, DataWatcher(notes), FileWatcher(notes), OutsideWatcher(notes)):
                watching.enter_context(observing(each))
            for sees in calls:
                watching.callback(sees.end)
                sees.begin()
            yield
        state = ENDED
    except SystemExit as error:
        state = FAILED if error.code else ENDED
        raise
    finally:
        _notes.clear()
        training.finish(state)
        notes.log.state[RACES] = count_races()
        notes.finish(state)


def forget() -> None:
    """Stop in a process that was forked from a rank, such as a worker of a DataLoader."""
    while _notes:
        notes = _notes.pop()
        notes.is_watching = False
        notes.log.let_go()


os.register_at_fork(after_in_child=forget)
