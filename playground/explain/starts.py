"""Where ranks that are observed leave their logs: a folder for each start of their world, whose
name is the number of restarts before it. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from playground.base.errors import UsageError
from playground.world.rendezvous.environment import restart_count

if TYPE_CHECKING:
    from playground.world.command_world import CommandWorld


def folder_of_this_start(folder: Path) -> Path:
    """In a rank."""
    return folder / str(restart_count())


def folder_of_last_start(folder: Path) -> Path:
    """In the launcher, when the world has ended."""
    last = max((int(each.name) for each in folder.glob("*") if each.name.isdecimal()), default=0)
    return folder / str(last)


def require_own_ranks(option: str, world: CommandWorld) -> None:
    """Raises `UsageError` if somebody else has started the ranks: this process does not see their
    logs."""
    if world.rank_env is not None:
        raise UsageError(
            f"{option} of ranks that were started elsewhere: let this command start them, with -n"
        )
