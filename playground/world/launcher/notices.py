"""Missing waits that ranks with simulated GPUs tell: what several ranks tell alike is told once.

A notice is held back until every rank has told it, for `HOLD` seconds at most. Of a rank that tells
it later, a sentence is told.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator

from playground.base.ranks import name_ranks
from playground.base.wrapping import WIDTH
from playground.world.launcher.output import HeldOutput, Output
from playground.world.simulated_gpu.races import notice_of_wait

HOLD = 5.0
"""Seconds for which a notice waits for that of other ranks."""
NOTICE = re.compile(notice_of_wait(r"\.\n").encode(), re.DOTALL)
"""It is written at once. Its last word alone ends in a full stop and a new line."""
PLACES = re.compile(r"(a wait is missing: \S+ at \S+) .*?(after \S+ at [^,]+),")
"""In a notice: the two operations and their lines."""


class Notices:
    """Decides when notices are told, and of which ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: dict[str, tuple[float, list[int]]] = {}
        """By notice, when it has waited long enough, and the ranks that have told it since."""
        self.told: set[str] = set()

    def add(self, rank: int, notice: str) -> None:
        _, ranks = self.held.setdefault(notice, (time.monotonic() + HOLD, []))
        ranks.append(rank)

    def take(self, *, all_notices: bool = False) -> Iterator[tuple[int, str]]:
        """The texts that are due, or all, each with the first of its ranks."""
        now = time.monotonic()
        for notice, (expires, ranks) in [*self.held.items()]:
            if all_notices or now >= expires or len(ranks) == self.size:
                del self.held[notice]
                yield ranks[0], say(notice, ranks, is_told=notice in self.told)
                self.told.add(notice)

    @property
    def seconds_left(self) -> float:
        """Until a notice has waited long enough; infinite where none waits."""
        expires = min((each for each, _ in self.held.values()), default=float("inf"))
        return max(0.0, expires - time.monotonic())


def say(notice: str, ranks: list[int], *, is_told: bool) -> str:
    """A notice of these ranks; of one that is told already, its first sentence."""
    words = f"simulated GPU: {name_ranks(ranks)}: {notice}"
    if is_told and (places := PLACES.match(notice)):
        words = f"simulated GPU: {name_ranks(ranks)}, too: {' '.join(places.groups())}."
    return textwrap.fill(words, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


class OutputWithNotices(HeldOutput):
    """A rank's stderr, or what has both its streams, whose notices wait for those of the others."""

    world: WorldWithNotices

    def write(self, data: bytes) -> None:
        rest = NOTICE.sub(self.hold, data)
        if rest:
            super().write(rest)

    def hold(self, found: re.Match[bytes]) -> bytes:
        self.world.notices.add(self.rank, " ".join(found[1].decode(errors="replace").split()))
        return b""


class WorldWithNotices:
    """The stderr of all ranks of a world."""

    def __init__(self, size: int) -> None:
        self.notices = Notices(size)
        self.outputs: dict[int, OutputWithNotices] = {}

    @property
    def seconds_left(self) -> float:
        return self.notices.seconds_left

    def pass_on(self, *, all_notices: bool = False) -> None:
        """Show the notices that are due, or all."""
        for rank, text in self.notices.take(all_notices=all_notices):
            Output.write(self.outputs[rank], text.encode())
