"""Judges of the exercises on hello."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from traceback import walk_stack
from typing import Any, NamedTuple

import torch.distributed as dist

from playground.base.upstream import default_store
from playground.exercises.cases import Actions, Case, Cases
from playground.exercises.exercise import AWAITS, RETURNED, Place
from playground.exercises.observation import Problem
from playground.exercises.transcript import WRITING
from playground.tap.replacement import replaced
from playground.ui.units import plural
from playground.world.rank.reports import report


def whoami(rank: int, size: int, seed: int) -> Cases:
    """Who am I: what the process group knows, and what only the environment says."""
    kept = dict(os.environ)
    try:
        for ranks in (1, 2):
            node = rank // ranks  # which torchrun calls the group rank
            os.environ.update(
                LOCAL_RANK=str(rank % ranks), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK=str(node)
            )
            returns = {"rank": rank, "size": size, "node": node}
            yield Case(
                f"{plural(ranks, 'rank')} per node",
                (),
                returns=returns,
                is_coded=False,
                gives_rank=False,
            )
    finally:
        os.environ.clear()
        os.environ.update(kept)


LATE = 1.0
"""Seconds that rank 0 waits for the others at most, before it writes."""


class State(NamedTuple):
    """What a process does in its attempt."""

    does: list[str] | bool
    """It waits for these keys, runs (False), or has returned (True)."""
    line: int
    """The solution's line that waits."""
    written: list[str]
    """The keys that it has written so far."""


class WatchedStore(dist.Store):
    """The world's store, for one attempt: a wait that cannot end is a deadlock. It is proved where
    every process waits or has returned, and what is waited for is still not there after that was
    seen. Rank 0 writes when the others wait or have returned, so that they read what an earlier
    attempt has left in every run, if they can."""

    def __init__(self, rank: int, size: int, attempt: int) -> None:
        super().__init__()
        self.rank = rank
        self.size = size
        store = default_store()
        self.inner = dist.PrefixStore("exercise", store)
        self.states = dist.PrefixStore(f"judge{attempt}", store)
        self.written = list[str]()
        self.note(False)

    def note(self, does: list[str] | bool) -> None:
        """Write the state of this process, for the others."""
        line = next(
            line for frame, line in walk_stack(None) if frame.f_code.co_filename != __file__
        )
        self.states.set(str(self.rank), json.dumps((does, line, self.written)))

    def set(self, key: str, value: str) -> None:
        end = time.monotonic() + LATE
        while self.rank == 0 and time.monotonic() < end:
            if all(state.does for state in self.read_states()[1:]):
                break
            report()  # a sign of life
            time.sleep(0.01)
        self.inner.set(key, value)
        self.written.append(key)

    def read_states(self) -> list[State]:
        """What each process has noted."""
        return [State(*json.loads(self.states.get(str(rank)))) for rank in range(self.size)]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.inner.get(key)

    def wait(self, keys: list[str], timeout: object = None) -> None:
        self.note(keys)
        while not self.inner.check(keys):
            self.find_standstill()
            report()  # a sign of life
            time.sleep(0.01)
        self.note(False)

    def find_standstill(self) -> None:
        states = self.read_states()
        awaited = [state.does for state in states if isinstance(state.does, list)]
        if all(state.does for state in states) and not any(map(self.inner.check, awaited)):
            at = [
                Place(f"{AWAITS}{', '.join(state.does)}", None, state.line)
                if isinstance(state.does, list)
                else RETURNED
                for state in states
            ]
            written = sorted({key for state in states for key in state.written})
            report(standstill=dict(enumerate(at)), written=tuple(written))
            threading.Event().wait()


def hand_on(name: str) -> Callable[..., Any]:
    def call(store: WatchedStore, *args: Any) -> Any:
        if name in WRITING:
            store.written += args[0] if isinstance(args[0], list) else [args[0]]
        return getattr(store.inner, name)(*args)

    return call


for _name in (*WRITING, "check", "delete_key", "num_keys", "multi_get"):
    if _name not in vars(WatchedStore):
        setattr(WatchedStore, _name, hand_on(_name))
OF_THE_WORLD = ("RANK", "LOCAL_RANK", "GROUP_RANK")
"""Variables that say who a process is."""


def no_group(real: Callable[..., int]) -> Callable[..., int]:
    """As before `init_process_group`, for the solution."""

    def refuse(*args: object) -> int:
        raise ValueError("there is no process group yet: the store is all that processes share")

    return refuse


def rendezvous(rank: int, size: int, seed: int) -> Cases:
    """Ranks from a store: who gets which differs from run to run, so what all got is looked at
    together."""
    for attempt in range(2):
        address, returned = f"127.0.0.1:{4000 + 100 * attempt + rank}", list[object]()
        run = partial(meet, rank, size, attempt, address, returned)
        due = {
            "type of an address": "str",
            "their addresses": "all",
            "this one's address": "in its place",
            "ranks": list(range(size)),
        }
        yield Case(
            f"attempt {attempt}",
            (),
            run=run,
            held=(returned, address),
            combine=partial(look, rank),
            expected=due,
            is_coded=False,
        )


def meet(
    rank: int,
    size: int,
    attempt: int,
    address: str,
    returned: list[object],
    function: Callable[..., object],
) -> None:
    store = WatchedStore(rank, size, attempt)
    dist.group.WORLD.barrier().wait()  # all have noted that they run
    given = {name: os.environ.pop(name) for name in OF_THE_WORLD if name in os.environ}
    try:
        with replaced(dist, "get_rank", no_group):
            returned.append(function(size, store, attempt, address))
    finally:
        os.environ.update(given)
    store.note(True)


def look(rank: int, results: list[tuple[list[Any], str]]) -> object:
    """The results of all processes, the same in every run."""
    everyones = [returned for [returned], _ in results]
    addresses = [address for _, address in results]
    if not all(map(is_answer, everyones)):
        return everyones[rank]
    kind = "bytes" if any(isinstance(each, bytes) for each in everyones[rank][1]) else "str"
    everyones = [(number, [*map(as_text, theirs)]) for number, theirs in everyones]
    number, mine = everyones[rank]
    # Not which ranks lack some: that differs from run to run.
    found = "all" if all({*each} == {*addresses} for _, each in everyones) else "not all"
    if any(each not in addresses for _, theirs in everyones for each in theirs):
        found = "others, such as an earlier attempt's"
    is_own = number in range(len(mine)) and mine[number] == addresses[rank]
    place = ""
    if found == "all":
        place = "in its place" if is_own else "elsewhere"
    return {
        "type of an address": kind,
        "their addresses": found,
        "this one's address": place,
        "ranks": sorted(number for number, _ in everyones),
    }


def as_text(address: object) -> object:
    return address.decode(errors="replace") if isinstance(address, bytes) else address


def is_answer(returned: Any) -> bool:
    """Whether it is a number and a list."""
    kinds = [type(each) for each in returned] if isinstance(returned, (tuple, list)) else []
    return kinds == [int, list]


def share(rank: int, size: int, seed: int) -> Cases:
    """Who works on what: as even as can be, all samples, each once."""
    for samples in (7, 12, 60_000, 2, 1, 0):
        ends = [0]
        for other in range(size):
            ends.append(ends[-1] + (samples - ends[-1] + size - other - 1) // (size - other))
        about, due = plural(samples, "sample"), (ends[rank], ends[rank + 1])
        actions = Actions()
        yield Case(
            about,
            (),
            returns=due,
            names=("begin", "end"),
            is_coded=False,
            run=partial(note_end, rank, size, samples, due[0], actions),
            actions=actions,
        )


def note_end(
    rank: int, size: int, samples: int, begin: int, actions: Actions, function: Callable[..., Any]
) -> object:
    """Note a share that is not two numbers, or begins where it should and ends after the last
    sample."""
    returned = function(rank, size, samples)
    match returned:
        case list() | tuple() if len(returned) != 2:
            words = f"returns {plural(len(returned), 'value')}, should be 2: begin and end"
            actions.problems.append(Problem("a share is two numbers", words))
        case (first, int(end)) if first == begin and end > samples:
            words = f"end is {end}: there are only {plural(samples, 'sample')}"
            actions.problems.append(Problem("ends after the last sample", words))
    return returned
