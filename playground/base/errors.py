"""Every error a user can meet: its message and its exit code.

Ctrl-C (130) and SIGTERM (143) are not errors of ours: Python raises them, the command line maps
them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playground.base.ranks import group_alike, name_ranks
from playground.base.wrapping import wrap_sentence

if TYPE_CHECKING:
    from playground.explain.hang.wording import Diagnosis


class PlaygroundError(Exception):
    """Base of everything the playground raises on purpose."""

    exit_code = 1
    diagnosis: Diagnosis | None = None
    """The explanation from the ranks' flight recorders, if they have one."""

    @property
    def headline(self) -> str:
        """Its first line: what happened, without tracebacks and stacks."""
        return str(self).partition("\n")[0]


class UsageError(PlaygroundError):
    """The user asked for something that cannot be done here. One line: what was asked, the rule,
    what to do."""

    exit_code = 2


class ForkServerFailed(PlaygroundError):
    """The fork server, the process that ranks come from, was killed, is stopped, or could not start
    a rank."""

    def __str__(self) -> str:
        return f"the fork server, which ranks come from, {super().__str__()}"


class StoreFailed(PlaygroundError):
    """The process that serves the store, through which ranks meet, was killed, or has failed."""

    def __str__(self) -> str:
        return f"the process that serves the ranks' store {super().__str__()}"


class RendezvousTimeout(PlaygroundError):
    """The ranks did not find each other within the timeout."""


class RankFailed(PlaygroundError):
    """A rank raised, was killed by a signal, or left without a result.

    `rank` and `size` say which of how many; `traceback` is that rank's own, empty if it left none;
    `others` maps the ranks it may have waited for to where they stood, and `outcomes` those that do
    not stand anywhere to what became of them. What another rank has done is told first where this
    one lost it, or waited for it in vain.
    """

    def __init__(self, rank: int, size: int, reason: str, traceback: str = "") -> None:
        super().__init__(rank, size, reason, traceback)
        self.rank = rank
        self.size = size
        self.reason = reason
        self.traceback = traceback
        self.others: dict[int, str] = {}
        self.outcomes: dict[int, str] = {}
        self.refusal = ""
        """What the program itself says it cannot do: the message of its `assert`, with the line, or
        of its `sys.exit`."""

    @property
    def headline(self) -> str:
        own, first = self.own_headline, super().headline
        return own if own.startswith(first) else first

    @property
    def own_headline(self) -> str:
        """What this rank has done, in one line."""
        return f"rank {self.rank} of {self.size} {self.reason}".partition("\n")[0]

    def __str__(self) -> str:
        _, line, more = self.reason.partition("\n")
        head = wrap_sentence(self.own_headline, at_spaces=True) + line + more
        told = join_paragraphs(format_outcomes(self.outcomes), format_stacks(self.others))
        own = join_paragraphs(head, self.traceback, told)
        lost = LOST_PEER.search(self.reason)
        is_victim = lost or TIMED_OUT.search(self.reason)
        culprits = self.diagnosis.culprits if self.diagnosis else ()
        if lost and culprits and self.rank not in culprits:
            peers = name_ranks(culprits)
            head = f"rank {self.rank} then lost its connection to {peers} ({lost[0]})"
            own = join_paragraphs(head, told)
        parts = (self.diagnosis, own) if is_victim else (own, self.diagnosis)
        return join_paragraphs(*parts)


class ProgramRefused(PlaygroundError):
    """Every rank of a program has failed by an `assert` with a message, or by `sys.exit` with one:
    the program cannot do what it was asked to. One line, the message of the lowest rank. The exit
    code is Python's for both."""


class PeerDisconnected(RankFailed):
    """A rank failed because another one hung up on it: look for the failure of that one. In a world
    that was joined, the reason names it."""


class Preempted(PlaygroundError):
    """Raised by every rank: SIGTERM asked them to end, and they have stored where they are, after
    `step`. The exit code is EX_TEMPFAIL of sysexits.h: what asked is to try again.
    """

    exit_code = 75

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step

    def __str__(self) -> str:
        return f"preempted by SIGTERM after step {self.step}"


TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout|failed to pass monitoredBarrier")
"""How backends say that an operation took too long."""


def has_timed_out(traceback: str) -> bool:
    """Whether the exception of this traceback, or one below it, says that an operation took too
    long. The lines of the code, which are indented, may name a timeout in any failure."""
    said = (line for line in traceback.splitlines() if not line.startswith("  "))
    return any(map(TIMED_OUT.search, said))


LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|"
    r"Pair is not connected(?= \(.* <--> \[[\d.:a-f]+\])"
)
"""How backends say that the process at the other end of a connection has ended."""
UNHEARD = "  (no answer: stopped, or inside C code that holds the GIL)"
"""In the place of the stack of a rank that has not answered."""
FAILS = "  (fails itself)"
"""The same, of a rank that is reporting a failure of its own."""


class RankTimeout(PlaygroundError):
    """No rank said anything for `timeout` seconds. `stacks` maps each unfinished rank to where it
    stands. If only some have answered, those that have not are the ones that are named: the rest
    may be waiting for them."""

    def __init__(self, size: int, timeout: float, stacks: dict[int, str]) -> None:
        super().__init__(size, timeout, stacks)
        self.size = size
        self.timeout = timeout
        self.stacks = stacks

    @property
    def headline(self) -> str:
        named = [rank for rank, stack in self.stacks.items() if stack == UNHEARD]
        why = UNHEARD.strip(" ()")
        if len(named) in (0, len(self.stacks)):
            named, why = [*self.stacks], "a hang, or a timeout too short for the work"
        who = f"{name_ranks(named)} of {self.size}"
        return f"no sign of life for {self.timeout:g} s from {who}: {why}"

    def __str__(self) -> str:
        return join_paragraphs(
            wrap_sentence(self.headline), self.diagnosis, format_stacks(self.stacks)
        )


class Deadlock(RankTimeout):
    """Ranks wait for each other, or for one that has finished: none of their operations can
    complete. `diagnosis` says who is to blame. Raised as soon as it is proved, `timeout` seconds
    after the last sign of life."""

    def __init__(
        self, size: int, timeout: float, stacks: dict[int, str], diagnosis: Diagnosis
    ) -> None:
        super().__init__(size, timeout, stacks)
        self.args = size, timeout, stacks, diagnosis
        self.diagnosis: Diagnosis = diagnosis

    @property
    def headline(self) -> str:
        return str(self).partition("\n")[0]

    def __str__(self) -> str:
        return str(self.diagnosis)


class GroupGone(RuntimeError):
    """A process group is used after the world in which it was made."""

    def __init__(self) -> None:
        super().__init__(
            "this group is gone since the ranks formed their world anew: make it again with "
            "new_group, and wrap models in DistributedDataParallel again"
        )


def join_paragraphs(*parts: object) -> str:
    """Those that are not empty, one below the other."""
    return "\n".join(str(part) for part in parts if part)


def format_outcomes(outcomes: dict[int, str]) -> str:
    """What became of the ranks: a line for each outcome."""
    alike = group_alike(outcomes)
    return "\n".join(f"{name_ranks(ranks)} {outcome}" for outcome, ranks in alike.items())


def format_stacks(stacks: dict[int, str]) -> str:
    """Where the ranks stand: a paragraph for each place."""
    alike = group_alike({rank: stack.rstrip() for rank, stack in stacks.items()})
    return "\n".join(
        f"{name_ranks(ranks)} {'stand' if ranks[1:] else 'stands'} at:\n{stack}"
        for stack, ranks in alike.items()
    )


for _error in [*vars().values()]:
    if isinstance(_error, type) and issubclass(_error, PlaygroundError):
        _error.__module__ = "playground"  # users import them from there, and tracebacks say so
