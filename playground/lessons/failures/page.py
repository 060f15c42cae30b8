"""The command `failures`: what is said of each program, by torch and by the playground, what is
expected of it, and the text. Does not import torch."""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from playground.console.options import only_option
from playground.console.session import Ending, Session, run_to_its_end
from playground.console.tables import Texts
from playground.console.text import good, heading, prose
from playground.console.units import plural
from playground.lessons import LESSONS
from playground.runtime.errors import Deadlock, PlaygroundError, RankTimeout, UsageError
from playground.runtime.files import temporary_folder
from playground.runtime.flight_recorder import Kind
from playground.runtime.flight_recorder.box import SWITCH
from playground.runtime.flight_recorder.diagnosis import format_ranks
from playground.runtime.launcher.entry import CommandWorld, run_as_it_is
from playground.runtime.remote import Remote

LESSON = LESSONS["failures"]
LISTEN = LESSON.remote("listen", "experiment")
LISTEN_IN_DETAIL = LESSON.remote("listen_in_detail", "experiment")
SYMBOLS = "torch._inductor"
"""torch's flight recorder imports it when it first tells lines, for a second in each process."""
LIMIT = 2.0
"""Seconds that a call waits for other ranks, as on the board."""


@dataclass(frozen=True)
class Expected:
    """How a program goes wrong."""

    kind: Kind | None
    """That of the diagnosis; None if there is none."""
    culprits: Sequence[int] | None
    """Ranks that it names, None for all; without a diagnosis, those whose values differ."""
    error: str = ""
    """What `launch` raises: without an error, the values are wrong."""


PROGRAMS = {
    "fit": Expected(Kind.ENDED, [0], Deadlock.__name__),
    "gossip": Expected(Kind.GROUPS, None, Deadlock.__name__),
    "count": Expected(Kind.SHAPES, [1]),
    "average": Expected(None, [0]),
    "save": Expected(Kind.STRAGGLER, [0], RankTimeout.__name__),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is said of a program. Sequences have an item for each rank."""

    name: str
    torch: Sequence[str]
    """What it has returned, or what torch has raised."""
    detail: Sequence[str]
    """The same with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    recorder: Sequence[str]
    """What torch's flight recorder has of the rank's calls."""
    error: str
    """Class of what `launch` raises; empty for none."""
    told: str
    """What the playground says."""
    diagnosis: str
    """The kind of that."""
    culprits: Sequence[int]
    """The ranks that it names; without a diagnosis, those whose value is not the most common."""
    results: Sequence[object] | None
    """The return value of each rank; None if `launch` raised."""


def find_problem(found: Outcome) -> str:
    """The first thing that is not as expected; empty if everything is."""
    expected, size = PROGRAMS[found.name], len(found.torch)
    culprits = [*(range(size) if expected.culprits is None else expected.culprits)]
    checks: list[tuple[str, object, object]] = [
        ("error", expected.error, found.error),
        ("diagnosis", expected.kind or "", found.diagnosis),
        ("ranks", culprits, [*found.culprits]),
    ]
    wrong = (
        f"{found.name}: expected the {what} {wanted or 'none'}, found {instead or 'none'}"
        for what, wanted, instead in checks
        if wanted != instead
    )
    return next(wrong, "")


def find_odd(results: Sequence[object]) -> list[int]:
    """The ranks whose value is not the most common one."""
    values = [*map(repr, results)]
    usual = max(values, key=values.count)
    return [rank for rank, value in enumerate(values) if value != usual]


@contextlib.contextmanager
def flight_recorder_off() -> Iterator[None]:
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def listen(world: CommandWorld, function: Remote, names: Sequence[str]) -> list[tuple[Any, ...]]:
    """What torch alone says of each program, rank by rank: see the experiment. The ranks form their
    groups themselves, as under torchrun; what torch logs beside that goes to files."""
    with flight_recorder_off(), temporary_folder(LESSON.name) as folder:
        by_rank = world.run(function, [*names], bare=True, fresh=True, output=folder)
    return [*zip(*by_rank, strict=True)]


def watch(world: CommandWorld, name: str) -> Ending:
    """Run a program with the flight recorder that every launch has. A deadlock is proved; only
    what takes long has to be ended."""
    patience = (None,) if name == "gossip" else ()  # of its groups: the launcher has its own
    limit = {"timeout": LIMIT} if PROGRAMS[name].error == RankTimeout.__name__ else {}
    return run_to_its_end(world, LESSON.remote(name), *patience, **limit)


def run(world: CommandWorld, names: Sequence[str]) -> list[Outcome]:
    """Run programs three times: watched, and recorded if that is wanted; by torch alone; by torch
    alone in detail."""
    endings = [watch(world, name) for name in names]
    world.around = run_as_it_is
    plain, detail = (listen(world, each, names) for each in (LISTEN, LISTEN_IN_DETAIL))
    return [*map(describe, names, endings, plain, detail)]


def describe(
    name: str, ending: Ending, plain: Sequence[tuple[str, str]], detail: Sequence[str]
) -> Outcome:
    torch, recorder = zip(*plain, strict=True)
    error, found, results = ending.error, ending.diagnosis, ending.results
    return Outcome(
        name=name,
        torch=torch,
        detail=detail,
        recorder=recorder,
        error=type(error).__name__ if error else "",
        told=str(found or error or ""),
        diagnosis=found.kind if found else "",
        culprits=found.culprits if found else find_odd(results or []),
        results=results,
    )


def outcome_texts(outcome: Outcome) -> Texts:
    """The program, and under a heading for each, what is said of it. What several ranks are told is
    shown once, even if the numbers in it differ."""
    about = LESSON.remote(outcome.name).summary
    said = {
        "torch": outcome.torch,
        "torch, with TORCH_DISTRIBUTED_DEBUG=DETAIL": outcome.detail,
        "torch's flight recorder": outcome.recorder,
    }
    if outcome.results is not None:
        said["the playground: the value of each rank"] = [*map(str, outcome.results)]
    texts: Texts = [prose(heading(outcome.name), f": {about}")]
    for name, by_rank in said.items():
        texts.append(prose(f"  {name}"))
        ranks_told = defaultdict[str, list[int]](list)
        for rank, words in enumerate(by_rank):
            is_error = re.search(r"[Rr]anks? \d", words)
            ranks_told[re.sub(r"\d+", "", words) if is_error else words].append(rank)
        for ranks in ranks_told.values():
            who = f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"
            texts.append(prose(f"    {who}: {by_rank[ranks[0]]}"))
    if outcome.told:
        name = outcome.error or "a warning"
        named = f": {name}" * (outcome.told.partition(":")[0] != name.lower())
        texts += [prose(f"  the playground{named}"), outcome.told]
    return texts


@LESSON.run_by(only_option(PROGRAMS, "programs"))
def command(session: Session, only: tuple[str, ...]) -> None:
    names = [name for name in PROGRAMS if not only or name in only]
    world = session.world
    if session.run.see and len(names) > 1:
        raise UsageError("--see records one program: name it with --only")
    if world.rank_env:
        raise UsageError(
            f"{LESSON.name} starts worlds of its own: run it without torchrun, RANK and WORLD_SIZE"
        )
    world.warm_up(LISTEN, SYMBOLS)
    session.say(f"{LESSON.name}: {world}")
    session.bar.show(f"running {plural(len(names), 'program')} three times")
    outcomes = run(world, names)
    session.bar.clear()
    for outcome in outcomes:
        session.say("", *outcome_texts(outcome))
    session.print_document({}, programs=outcomes)
    if problem := next(filter(None, map(find_problem, outcomes)), ""):
        raise PlaygroundError(problem)
    shown = LESSON.conclude(
        world.size,
        ended=sum(
            not all(words.startswith("returned ") for words in each.torch) for each in outcomes
        ),
        programs=plural(len(names), "program"),
        named=sum(bool(each.diagnosis) for each in outcomes),
    )
    verdict = f"{plural(len(names), 'program')} went wrong as expected"
    session.say("", prose(f"Shown: {shown}; ", good(verdict), "."))
