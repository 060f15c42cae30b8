"""In a rank: its flight recorder, and what its process groups have counted themselves.

A group's own count of collectives, where it has one, tells whether all of them came by here. What
came otherwise, or cannot be read, makes the rank unknown: see `wait_graph`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import get_ident
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor

from playground.base.errors import GroupGone
from playground.base.upstream import (
    count_collectives,
    devices_of,
    is_carried_by_nccl,
    is_registered,
    read_timeout,
)
from playground.explain.hang.activity import clues
from playground.explain.hang.box import Box, Known
from playground.explain.hang.box_format import GPU, MAIN, Description
from playground.explain.hang.queues import Queues
from playground.explain.hang.states import BACKWARD, BUCKETS, COLLECTIVE, HOST, STRANGERS, Gpu
from playground.tap import number_of, ranks_of
from playground.tap.observer import FastObserver
from playground.tap.tap import record_also

ZERO = timedelta(0)


@dataclass(slots=True)
class Tally:
    """How many operations a group has counted itself, besides those that are counted by this
    process's box."""

    group: ref[Any]
    known: int
    inside: int = 0
    """How many collectives with others inside are under way: these are not counted one by one."""
    places: set[int] = field(default_factory=set)
    """The places of its counts in the box."""


class FlightRecorder(FastObserver):
    """Operations of this process are written to `box`, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.box: Box | None = None
        self.timeout = ZERO
        """The world's, which ends before any longer one does."""
        self.limited: set[int] = set()
        """Ids of the groups whose operations have, or may have, a limit that ends before the
        world's."""
        self.tallies: dict[int, Tally] = {}
        """By the id of the group, of those that count."""
        self.alive: dict[int, ref[Any]] = {}
        """The groups that have been seen, by id: what is known by the id of a group goes with
        it."""
        self.gone: WeakSet[Any] = WeakSet()
        """The groups of earlier programs, which were destroyed with their worlds."""
        self.queues: Queues | None = None
        """The streams of this rank's GPU, once a group is carried by NCCL."""
        self.on_gpu: dict[int, bool] = {}
        """By the id of each such group, whether NCCL carries all its tensors, those of the host
        too."""

    def is_limit(self, timeout: timedelta | None) -> bool:
        """Whether a timeout ends before the world's, so that the program may go on."""
        return timeout is not None and ZERO < timeout < self.timeout

    def read_group(self, group: Any, is_new: bool = False) -> None:
        """Read the timeout of a group and, if it `is_new`, how many collectives it took to make
        it. Raises `GroupGone`."""
        box, key = self.box, id(group)
        if box is None:
            return
        if group in self.gone:
            raise GroupGone
        timeout = read_timeout(group)
        if timeout is not None and timeout >= self.timeout:
            self.limited.discard(key)
        else:
            self.limited.add(key)
        if key in self.alive and not is_new:
            return

        def forget(_: Any) -> None:  # another may get its id
            if self.alive.pop(key, None):
                self.tallies.pop(key, None)
                if self.on_gpu.pop(key, None) is not None and self.queues:
                    self.queues.forget_group(key)
                if self.box:
                    self.box.known.clear()

        self.alive[key] = ref(group, forget)
        if is_carried_by_nccl(group):
            self.watch_gpu(box, group)
        if not is_registered(group):
            box.doubt("which ranks a group has that torch.distributed did not register")
            return
        counted = count_collectives(group)
        if counted is not None:
            self.tallies[key] = Tally(ref(group), counted if is_new else 0)

    def describe(self, box: Box, key: Any, group: Any, description: Description) -> Known:
        """From now on, operations of this group like this are known by `key`. The description's
        peer is a number in the group, None is anyone; the group's ranks and number are put in."""
        self.read_group(group)
        ranks, peer = ranks_of(group), description.peer
        is_collective = description.kind == COLLECTIVE
        if peer is not None:
            # torch refuses a root that is none, and waits for a message for ever
            no_rank = None if is_collective else STRANGERS + peer
            peer = dict(enumerate(ranks)).get(peer, no_rank)
        known = box.describe(
            key, description._replace(group=ranks, peer=peer, number=number_of(group))
        )
        # which NCCL counts apart
        is_counted = is_collective or id(group) not in self.on_gpu
        if is_counted and (tally := self.tallies.get(id(group))):
            tally.places.add(known.count_at)
        return known

    def watch_gpu(self, box: Box, group: Any) -> None:
        """A group that NCCL carries: its operations are in the streams of the GPU."""
        if self.queues is None:
            self.queues = Queues(self.stand)
            clues.waits.append(self.queues.find_wait)
            record_also(self.queues.places)
        if not box.words[GPU]:
            self.queues.begin(box)
        self.on_gpu[id(group)] = all(each.type == "cuda" for each in devices_of(group))

    def is_on_gpu(self, group: Any, given: Any) -> bool:
        """Whether NCCL carries what a group's operation is given."""
        is_for_all = self.on_gpu.get(id(group))
        if is_for_all is not False:
            return bool(is_for_all)
        while isinstance(given, list | tuple) and given:
            given = given[0]
        return isinstance(given, Tensor) and given.is_cuda

    def stand(
        self, name: str, batches: Sequence[int], real: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Make a call in which the host waits for the end of these batches."""
        box = self.box
        if box is None or get_ident() != box.main_thread or not (batches and box.words[GPU]):
            return real(*args, **kwargs)
        key = HOST, name
        known = box.known.get(key) or box.describe(key, Description(HOST, name))
        call = box.call(known, 3, False)
        box.put_in_queue(call, None, batches)
        thread = {threading.get_native_id()} if box.words[GPU] == Gpu.REAL else set[int]()
        clues.spinning.update(thread)
        with self.main_thread_in(box, call):
            try:
                return real(*args, **kwargs)
            finally:
                clues.spinning.difference_update(thread)
                box.end(call)

    def check_groups(self) -> None:
        """Doubt what this rank is said to have called if its groups have counted more
        operations."""
        for key, tally in [*self.tallies.items()]:
            if not tally.inside and self.find_unseen(key) > 0 and self.box:
                self.box.doubt("what it has called by other ways than Python's")

    def find_unseen(self, key: int) -> int:
        """How many more operations this group has counted than this rank has been seen to call."""
        tally, box = self.tallies.get(key), self.box
        group = tally.group() if tally else None
        counted = None if group is None else count_collectives(group)
        if tally is None or box is None or counted is None:
            return 0
        return counted - tally.known - sum(box.words[place] for place in [*tally.places])

    def count_as_known(self, key: int) -> None:
        """What this group has counted by now is known."""
        if tally := self.tallies.get(key):
            tally.known += self.find_unseen(key)

    @contextlib.contextmanager
    def counted_apart(self, key: int) -> Iterator[None]:
        """What the group counts in this block is what the block knows of."""
        self.check_groups()
        tally = self.tallies.get(key)
        if tally:
            tally.inside += 1
        try:
            yield
        finally:
            if tally:
                tally.inside -= 1
                self.count_as_known(key)

    @contextlib.contextmanager
    def main_thread_in(self, box: Box, call: int) -> Iterator[None]:
        """If this is the main thread, it is in this operation."""
        is_main, before = get_ident() == box.main_thread, box.words[MAIN]
        if is_main:
            box.words[MAIN] = call
        try:
            yield
        finally:
            if is_main:
                box.words[MAIN] = before

    @contextlib.contextmanager
    def around(self, box: Box, name: str, group: Any, model: int) -> Iterator[list[int]]:
        """Record a collective of the group's model of this number, as `inside`. Of a kind that may
        be none, the block clears the list if it was one."""
        key = id(group)
        self.read_group(group)
        with self.counted_apart(key):
            limited, may_be_none = key in self.limited, name in (BUCKETS, BACKWARD)
            place = key, name, model
            known = box.known.get(place)
            if known is None:
                ranks, number = ranks_of(group), number_of(group)
                what = Description(COLLECTIVE, name, ranks, tag=model, number=number)
                known = box.describe(place, what)
            with self.inside(box, known, limited=limited, may_be_none=may_be_none) as calls:
                call, queues = calls[0], self.queues if key in self.on_gpu else None
                if queues:
                    queues.add(box, call, (key, None), ends=False)
                yield calls
                if queues and not (may_be_none and calls):
                    queues.hold(call, (key, None))

    @contextlib.contextmanager
    def inside(
        self, box: Box, known: Known, *, limited: bool, may_be_none: bool = False
    ) -> Iterator[list[int]]:
        """Record a collective that takes as long as this block, in which there may be others. If it
        `may_be_none`, it is taken back unless the block clears the list that it is in."""
        call = box.call(known, 4, limited)
        is_main, around = get_ident() == box.main_thread, box.around
        if is_main:
            box.around = box.words[MAIN] = call
        calls = [call]
        try:
            yield calls
        finally:
            if is_main:
                box.around = box.words[MAIN] = around
            box.end(call)
            if may_be_none and calls:
                box.take_back(call, known)
