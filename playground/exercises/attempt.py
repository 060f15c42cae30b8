"""An attempt: a solution runs in a world of one size, and its ranks report what they do. Does not
import torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from playground.base.errors import PlaygroundError, RankFailed, RankTimeout
from playground.base.ranks import group_alike, name_ranks
from playground.base.remote import remote
from playground.exercises.exercise import (
    AWAITS,
    BLOCKED,
    COMPUTES,
    DEADLOCK,
    ERROR,
    FAIL,
    LOOP,
    RETURNED,
    Exercise,
    Place,
)  # fmt: skip
from playground.exercises.observation import Failure, Observation, find_failure
from playground.world.launcher.launch import LaunchConfig, launch
from playground.world.rank.reports import Event

JUDGE = remote("playground.exercises.rank:judge")
DEADLINE = 5.0
"""Seconds that a rank may compute in one case."""
HANGS = 30.0
"""Seconds after which a world without a sign of life is ended: a rank that computes gives one, and
a deadlock is proved before."""
ENDLESS = "runs without end"
BREAKPOINT = "a breakpoint: check --debug opens it, on one rank after the other"
NEVER_WAIT = COMPUTES.name, "isend", "irecv"
"""Where a rank that has stopped reporting computes: these calls return at once."""
NUMBER = re.compile(r"\d+")
LEAVES = "has left before its end: return from the function"
SHORT_CUT, ONLY_MEMBERS, ANOTHER_ORDER = "short cut", "only members create", "another order"
"""Mistakes that are recognised in any exercise."""


@dataclass(frozen=True)
class Solution:
    """The learner's answer to an exercise, or the reference: a module that ranks are to have."""

    exercise: Exercise
    text: str
    file: str

    @property
    def is_catalogued(self) -> bool:
        """Whether it is the reference, the stub or a mistake of the catalogue. These leave a world
        as they have found it, if they return."""
        mistakes = (each.text for each in self.exercise.mistakes)
        return self.text in (self.exercise.solution, self.exercise.stub, *mistakes)


class Ended(Exception):
    """A rank has reported what ends the check."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class Attempt:
    """The reports of the ranks of one world of `size`, and the conclusions."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.case = -1
        """The latest that has begun; in the end, the number of the one that failed."""
        self.about = ""
        self.observed: dict[int, dict[int, Observation]] = {}
        """By case and rank."""
        self.at: dict[int, Place] = {}
        """Where each rank is: in the operation that it called last."""
        self.calls: dict[int, int] = {}
        """How many operations each rank has called in this case."""
        self.given: dict[int, tuple[str, int]] = {}
        """The dtype and the number of elements of what each rank gave its last operation."""
        self.written: tuple[str, ...] = ()
        """The keys that ranks had written to a store when they waited for others."""
        self.groups: dict[int, list[tuple[int, ...]]] = {}
        """The groups that each rank has made."""
        self.printed: dict[int, str] = {}
        """What each rank had printed in this case when it called its last operation."""
        self.failure: Failure | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the case that failed, or of the last one."""
        observed = self.observed.get(self.case, {})
        return observed[0].notes if 0 in observed else ()

    @property
    def are_first(self) -> bool:
        """Whether no rank has called an operation before the one that it is in."""
        return all(number <= 1 for number in self.calls.values())

    @property
    def places(self) -> dict[int, tuple[str, object]]:
        """Where the ranks are, whatever their lines are and the words in the keys that they wait
        for."""
        return {
            rank: (AWAITS, find_distances(place.name.removeprefix(AWAITS), self.written))
            if place.name.startswith(AWAITS)
            else (place.name, place.peer)
            for rank, place in self.at.items()
        }

    def take(self, rank: int, event: Event) -> None:
        """A report. Raises `Ended` for one that ends the check."""
        if "at" in event:
            self.at[rank] = event["at"]
            self.calls[rank] = self.calls.get(rank, 0) + 1
            self.given[rank] = event.get("given", ("", 0))
            self.printed[rank] = event.get("printed", self.printed.get(rank, ""))
        elif "observed" in event:
            self.observed.setdefault(event["case"], {})[rank] = event["observed"]
        elif "number" in event:
            self.at[rank] = COMPUTES
            self.calls[rank] = 0
            self.printed.pop(rank, None)
            if event["number"] > self.case:
                self.case = event["number"]
                self.about = event["about"]
        elif "group" in event:
            self.groups.setdefault(rank, []).append(event["group"])
        elif "standstill" in event:
            self.at = event["standstill"]
            self.written = event.get("written", ())
            raise Ended(self.find_standstill())
        elif event.get("status") in (FAIL, ERROR, LOOP):
            line, printed = event["line"], event.get("printed", "")
            words, status = event["words"], event["status"]
            raise Ended(Failure(status=status, rank=rank, words=words, line=line, printed=printed))

    def find_standstill(self) -> Failure:
        # computes in C code, or between calls that do not wait
        if endless := [rank for rank, place in self.at.items() if place.name in NEVER_WAIT]:
            return Failure(status=LOOP, rank=endless[0], words=ENDLESS)
        ranks = [
            f"rank {rank}: {describe_place(self.at.get(rank, RETURNED))}"
            for rank in range(self.size)
        ]
        if self.written:
            ranks.append(f"written: {', '.join(self.written)}")
        lines = [
            f"rank {rank}: {line}"
            for rank, text in sorted(self.printed.items())
            for line in text.splitlines()[-1:]
        ]
        return Failure(status=DEADLOCK, ranks=tuple(ranks), printed="\n".join(lines))

    def describe_killed(self, rank: int, reason: str) -> Failure:
        """The failure of a rank whose process has ended, in the operation that it called last. gloo
        aborts where tensors that meet there differ in size or dtype."""
        place = self.at.get(rank, RETURNED)
        if "SIGABRT" not in reason or not place.line:
            return Failure(status=ERROR, rank=rank, words=reason)
        together = {
            other
            for other, at in self.at.items()
            if (other == place.peer and at.peer == rank) or (at == place and place.peer is None)
        }
        told = (
            f"{reason} in {place.name}; do its tensors have the same size and dtype on all ranks?"
        )
        for item, what in enumerate(("dtype", "size")):
            by_rank = group_alike(
                {other: self.given.get(other, ("", 0))[item] for other in together | {rank}}
            )
            if len(by_rank) > 1:
                each = ", ".join(f"{has} on {name_ranks(ranks)}" for has, ranks in by_rank.items())
                told = f"{reason} in {place.name}: its tensors differ in {what}: {each}"
                break
        return Failure(status=ERROR, rank=rank, words=told, line=place.line)

    def find_missing(self, cases: Sequence[object]) -> Failure | None:
        """A rank that has returned without having been observed in all cases. `cases`: how many
        there were, by rank; a rank that has ended its process has returned None."""
        for rank, number in enumerate(cases):
            if not isinstance(number, int) or any(
                rank not in self.observed.get(case, {}) for case in range(number)
            ):
                return Failure(status=ERROR, rank=rank, words=LEAVES)
        return None

    def find_groups(self) -> Failure | None:
        """Groups that ranks made differently. What comes of it differs from run to run."""
        made = [self.groups.get(rank, []) for rank in range(self.size)]
        by_members = all(rank in each for rank, groups in enumerate(made) for each in groups)
        mistake = ONLY_MEMBERS if by_members else ANOTHER_ORDER
        for place, group in enumerate(made[0] or made[1 % self.size]):
            for rank, groups in enumerate(made):
                if groups[place : place + 1] != [group]:
                    words = f"has not made the group of {name_ranks(group)} when others did"
                    says = "new_group takes all ranks of the world, in one order"
                    return Failure(mistake=mistake, says=says, words=words, rank=rank)
        return None

    def end(self, failure: Failure | None) -> None:
        """The world has ended, with `failure` if it did not return. What was observed before is
        what is told."""
        for case in sorted(self.observed):
            if found := find_failure(self.observed[case], self.size):
                self.case = case
                failure = found
                break
        if failure is None or failure.status in (FAIL, DEADLOCK):
            failure = self.find_groups() or failure
        self.failure = failure


def find_distances(awaited: str, written: Iterable[str]) -> list[int]:
    """How far the numbers in written keys are from those in the awaited one, where the words
    between the numbers are the same: 1 for key/1 where key/0 is awaited."""
    words, numbers = NUMBER.split(awaited), [*map(int, NUMBER.findall(awaited))]
    return sorted(
        sum(map(int, NUMBER.findall(key))) - sum(numbers)
        for key in written
        if NUMBER.split(key) == words
    )


def describe_place(place: Place) -> str:
    """Where a rank is."""
    if not place.line:
        return place.name
    if place.name.startswith(AWAITS):
        return f"{place.name}, line {place.line}"
    direction = "to" if "send" in place.name else "from"
    peer = f" {direction} rank {place.peer}" if place.peer is not None else ""
    return f"in {place.name}{peer}, line {place.line}"


def attempt(
    solution: Solution, before: Sequence[Solution], size: int, seed: int, debug: bool = False
) -> Attempt:
    """Run a solution in a world of this size, in new processes unless it is a catalogued one."""
    made = Attempt(size)
    solutions = (*before, solution)
    config = LaunchConfig(
        timeout=HANGS,
        fresh=not all(each.is_catalogued for each in solutions),
        on_report=made.take,
        debug=range(size) if debug else (),
    )
    try:
        cases = launch(JUDGE, size, args=(solutions, seed, debug), config=config)
        failure = made.find_missing(cases)
    except Ended as end:
        failure = end.failure
    except RankTimeout:  # a rank that computes without end has reported it
        failure = made.find_standstill()
    except RankFailed as error:
        killed = made.describe_killed(error.rank, error.reason)
        failure = Failure(status=BLOCKED, words=error.headline) if error.traceback else killed
    except PlaygroundError as error:
        failure = Failure(status=BLOCKED, words=error.headline)
    made.end(failure)
    return made
