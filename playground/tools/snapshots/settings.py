"""What `snapshots measure` is asked for. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from playground.runtime.checks import check_at_least_one
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import check_flags, flag
from playground.survival.folder import DAMAGED, WHOLE, Examined, examine, find_steps


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """Raises `UsageError` for what cannot be measured."""

    folder: Path
    nbytes: int = 2**20
    """Of what all ranks share; each rank adds the state of its random number generator."""
    saves: int = flag(5, "Snapshots to take.", least=1)
    keep: int = flag(3, "Snapshots to keep.", least=1)

    def __post_init__(self) -> None:
        check_at_least_one(self, "nbytes")
        check_flags(self)

    @property
    def fingerprint(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name == "nbytes"}


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """What the saves of one rank took, save by save."""

    blocked: list[float]
    """Seconds for which training waits: for the copy."""
    written: list[float]
    """Seconds until the rank's files lie on the disk."""
    problem: str
    """Why a save has failed; empty if none has."""


def examine_folder(folder: Path, *, read_contents: bool) -> list[Examined]:
    """All snapshots in `folder`, the oldest first. Raises `UsageError` if there is none."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}: give one that a run has written snapshots into")
    found = [examine(folder, step, read_contents=read_contents) for step in reversed(find_steps(folder))]
    if found := [each for each in found if each.folder.is_dir()]:  # a run may have removed some meanwhile
        return found
    raise UsageError(f"{folder} holds no snapshots: give a folder with step-… in it, which a run has written")


def find_last_whole(snapshots: Sequence[Examined]) -> Examined | None:
    """The one that a run would go on from."""
    return next((each for each in reversed(snapshots) if each.condition == WHOLE), None)


def check_all(snapshots: Sequence[Examined]) -> None:
    """Raise `PlaygroundError` if a snapshot is damaged, or none is whole. One that is incomplete alone is no failure:
    a run that is killed leaves one."""
    if damaged := [str(each.step) for each in snapshots if each.condition == DAMAGED]:
        raise PlaygroundError(f"damaged: step{'s' * (len(damaged) > 1)} {', '.join(damaged)}")
    if not find_last_whole(snapshots):
        raise PlaygroundError("no snapshot is whole: a run cannot go on from here")


def check_times(times: Sequence[SaveTimes]) -> None:
    """Raise `PlaygroundError` if a rank could not save."""
    if problem := next((each.problem for each in times if each.problem), ""):
        raise PlaygroundError(problem)
