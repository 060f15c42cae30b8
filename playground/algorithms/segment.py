"""Memory that the ranks of one host share: each sees what the others have written, and nothing is
sent.

    rank 0 makes it, without a name: memfd_create   nothing is left in /dev/shm, whatever happens
    all open it as /proc/PID/fd/FD of rank 0, and   containers, users and hosts that share no memory
    look for a number that it has written there     are found out by trying
    all say whether they have it                    all use it, or none

Ranks meet in it by semaphores: `sem_post` and `sem_wait` order memory on every processor. A wait is
bounded: it tries for some microseconds, then sleeps in slices, between which it looks whether a
peer has ended or has given up.

A rank that leaves a call by an exception, at whatever point, can have the others' sums half done,
and its next call would meet a peer's earlier one. So an exception in a call breaks the memory for
all ranks: those that wait, and every later call, raise. Sources: memfd_create(2), sem_overview(7),
pidfd_open(2); the barrier is Hensgen, Finkel, Manber: Two Algorithms for Barrier Synchronization
(1988), International Journal of Parallel Programming 17
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import secrets
import select
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from playground.algorithms.semaphores import Semaphores
from playground.base import host
from playground.base.host import digest, namespace_id
from playground.base.lost_ranks import when_lost

SLOT = 1 << 20
"""Bytes that a rank copies in at a time. They stay in the cache: with 16 MiB an all-reduce takes
twice as long."""
LINE, PAGE = 64, 4096
"""Bytes: what cores pass to each other at a time, and what is mapped at a time."""
MOST_RANKS = 64
"""Ranks of a group on one host; more have no shared memory."""
MOST_VIEWS = 64
"""How many views of slots are kept, one for each half, dtype and number of elements."""
TRIES, TRIES_IF_CROWDED = 60, 5
"""How often a rank looks for a signal before it sleeps: where each rank has a core, and where it
keeps another from its core by looking."""
SLICE = 0.05
"""Seconds that a rank sleeps between two looks at its peers."""
LOST = "Connection closed by peer"
"""How gloo begins to say that a peer has ended; whoever reads errors knows these words."""
CALL = struct.Struct("QQQ")
"""The numbers of a call that ranks compare: which it is, and two numbers whose meaning is the
caller's."""
GONE, BROKEN = 1, 2
"""A rank's flag, when it takes part in no further call, and when it has left a call."""

Result = TypeVar("Result")
Exchange = Callable[[Sequence[int]], "list[tuple[int, ...]]"]
"""All-gather of a few 64-bit numbers among the ranks of a group."""


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """In this block, tensors are made as if the program had set no mode and no default device."""
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        yield


class Round(NamedTuple):
    """A round of a meeting, in which this rank posts one semaphore and waits for another."""

    number: int
    theirs: int
    """The address of the semaphore to post."""
    mine: int
    """That of the one to wait for."""


class Segment:
    """Memory of which each rank has a part, and through which they call each other.

    `rank` and `size` are this rank's number among the `members` (their ranks in the world), and how
    many they are. All of them make the same calls (`run`) in the same order. `timeout` returns how
    many seconds one may wait.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        memory: mmap.mmap,
        pidfds: Sequence[int],
        timeout: Callable[[], float],
    ) -> None:
        self.members = tuple(members)
        self.rank = rank
        self.size = len(members)
        self.timeout = timeout
        self.memory = memory
        self.number = 0
        """The latest call's, counted from 1."""
        self.lock = threading.Lock()
        """Held inside a call. Who leaves a call by an exception does not release it."""
        self.thread = 0
        """The one that holds it; 0 for none."""
        others = [each for each in range(self.size) if each != rank]
        self.peers = dict(zip(others, pidfds, strict=True))
        weakref.finalize(self, close_all, list(pidfds))
        with outside_modes():
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.half = 0
        """Which of the two slots of each rank the next `meet` is about."""
        self.tries = TRIES if self.size <= host.cores() else TRIES_IF_CROWDED
        self.layout = layout = Layout(self.size)
        self.flags, self.fine = slice(layout.broken, layout.broken + self.size), bytes(self.size)
        self.waits = [
            ctypes.c_uint64.from_buffer(memory, layout.waits(each)) for each in range(self.size)
        ]
        """For each rank the round in which it sleeps, from 1 on, or 0: each writes its own."""
        self.semaphores = Semaphores()
        self.rounds = [
            Round(k, self.semaphore(k, (rank + (1 << k)) % self.size), self.semaphore(k, rank))
            for k in range(layout.rounds)
        ]
        self.views: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}
        segments.add(self)

    def slots(self, half: int, dtype: torch.dtype, elements: int) -> list[torch.Tensor]:
        """The slots of all ranks, in their order, of that half: flat, of `elements` each. They are
        kept, since making them takes longer than adding small ones."""
        found = self.views.get((half, dtype, elements))
        if found is None:
            if len(self.views) == MOST_VIEWS:
                self.views.clear()
            starts = [self.layout.slot(half, rank) for rank in range(self.size)]
            with outside_modes():  # calls in others will find them
                found = [
                    self.bytes[start : start + elements * dtype.itemsize].view(dtype)
                    for start in starts
                ]
            self.views[half, dtype, elements] = found
        return found

    def check(self) -> None:
        """Raise `RuntimeError` if no call can be made any more, or in a process that was forked
        from the rank's."""
        if self.memory[self.flags] != self.fine:
            self.check_flags(*range(self.size))

    def run(self, call: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """Make a call that all ranks make: `call(self, *args, **named)`.

        Whatever is raised in it, also by the handler of a signal, breaks the memory for all ranks,
        and is raised on. Raises `RuntimeError` if it is broken already, or a rank has left the
        group.
        """
        self.check()
        try:
            return self.make(call, *args, **named)
        except BaseException:
            self.give_up()
            raise

    def make(self, call: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """Make a call, when no other thread is in one."""
        me = threading.get_ident()
        while not self.lock.acquire(timeout=SLICE):
            if me == self.thread:
                raise RuntimeError(
                    "this thread is inside a call in the memory that the ranks share"
                )
            self.check_flags()
        self.thread = me
        self.number = self.number + 1
        result = call(self, *args, **named)
        self.thread = 0
        self.lock.release()
        return result

    def meet(self) -> None:
        """Wait for all ranks, and from now on see what they wrote before. Then the other slots are
        to be used.

        A rank that comes here for the next time has done with the slots that this time was about:
        so whoever leaves the next meeting may write them again, and one meeting for each use is
        enough.

        Raises `RuntimeError` if a peer has ended or given up, or does not come within the group's
        timeout.
        """
        post, try_wait = self.semaphores.post, self.semaphores.try_wait
        for number, theirs, mine in self.rounds:
            post(theirs)
            if try_wait(mine):
                self.await_signal(number)
        self.half ^= 1

    def agree(self, call: tuple[int, int]) -> list[tuple[int, int]]:
        """`meet`, and compare which of its calls each rank is in, and what it calls, in numbers.
        Returns this rank's call, alone, if it is that of all; otherwise those of all ranks."""
        start, mine = self.layout.calls(self.half), CALL.pack(self.number, *call)
        here = start + self.rank * CALL.size
        self.memory[here : here + CALL.size] = mine
        self.meet()
        packed = self.memory[start : start + self.size * CALL.size]
        if packed == self.size * mine:
            return [call]
        calls = [*CALL.iter_unpack(packed)]
        if len({number for number, *_ in calls}) > 1:
            raise RuntimeError(f"{LOST}: a rank has left a call, and made the next")
        return [(first, second) for _, first, second in calls]

    def await_signal(self, number: int) -> None:
        """Wait for this rank's signal of that round, which has not come yet."""
        semaphore, try_wait = self.rounds[number].mine, self.semaphores.try_wait
        for _ in range(self.tries):
            os.sched_yield()
            if not try_wait(semaphore):
                return
        timeout = self.timeout()
        end = time.monotonic() + timeout
        self.waits[self.rank].value = number + 1
        while not self.semaphores.wait(semaphore, SLICE):
            late = self.find_late()
            self.check_flags(late)
            if late in self.peers and select.select([self.peers[late]], [], [], 0)[0]:
                raise RuntimeError(f"{LOST}: the process of {self.name(late)} has ended")
            if time.monotonic() > end:
                raise RuntimeError(
                    f"Timed out after {timeout:g} s in the memory that the ranks of this host "
                    f"share: {self.name(late)} did not come"
                )
        self.waits[self.rank].value = 0

    def find_late(self) -> int:
        """The rank that all others wait for: who sleeps waits for the one that is to signal it, and
        so on, until one does not sleep, or has a signal that it has not woken up for."""
        rank = self.rank
        for _ in range(self.size):
            number = self.waits[rank].value - 1
            if number < 0 or self.semaphores.value(self.semaphore(number, rank)):
                break
            rank = (rank - (1 << number)) % self.size
        return rank

    def exchange(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """All-gather of a few numbers of 64 bits."""
        slots = self.slots(self.half, torch.int64, len(values))
        slots[self.rank].copy_(torch.tensor(values, device="cpu"))
        self.meet()
        return [tuple(slot.tolist()) for slot in slots]

    def allocate(
        self, elements: int, dtype: torch.dtype, tensors: int | None = None
    ) -> list[torch.Tensor]:
        """Flat tensors of zeros in memory that all ranks share: one for each of them, in their
        order, or `tensors` of them. All must call this.

        Raises `MemoryError` on all ranks where any has no memory for it.
        """
        size = -(-(elements + 1) * dtype.itemsize // PAGE) * PAGE
        number = self.size if tensors is None else tensors
        memory = self.run(
            lambda _: share(self.rank, range(self.size), PAGE + number * size, self.exchange)
        )
        if isinstance(memory, str):
            raise MemoryError(
                f"no {number * size} bytes for the ranks of this host to share: {memory}"
            )
        starts = range(PAGE, PAGE + number * size, size)
        with outside_modes():
            return [
                torch.frombuffer(memory, dtype=dtype, count=elements, offset=start)
                for start in starts
            ]

    def check_flags(self, *needed: int) -> None:
        """Raise `RuntimeError` if any rank has given up, or one of those that are needed has left
        the group."""
        flags = self.memory[self.flags]
        if not self.fine:
            raise RuntimeError(
                "this process was forked from a rank: it cannot call the ranks' collectives"
            )
        if (rank := flags.find(BROKEN)) >= 0:
            raise RuntimeError(
                f"{LOST}: {self.name(rank)} has left a call in the memory that the ranks of this "
                "host share: make a new process group"
            )
        for rank in needed:
            if flags[rank] == GONE:
                raise RuntimeError(f"{LOST}: {self.name(rank)} has destroyed the process group")

    def name(self, rank: int) -> str:
        """A rank of the segment, by its number in the world."""
        return f"rank {self.members[rank]}"

    def semaphore(self, number: int, rank: int) -> int:
        """Address of the semaphore for which this rank waits in that round."""
        return self.bytes.data_ptr() + self.layout.semaphore(number, rank)

    def give_up(self) -> None:
        """Say that this rank has left a call: every rank that waits in this memory, or comes, gets
        an error."""
        self.memory[self.flags.start + self.rank] = BROKEN

    def leave(self) -> None:
        """Say that this rank makes no further call. What all have come to, others can still end."""
        if BROKEN not in self.memory[self.flags]:
            self.memory[self.flags.start + self.rank] = GONE


class Layout:
    """Where things lie in the memory of `size` ranks: the number that proves it to be theirs,
    calls, flags, waits, semaphores, slots."""

    def __init__(self, size: int) -> None:
        self.size, self.rounds = size, (size - 1).bit_length()
        self.broken = self.calls(2)
        self.lines = -(-(self.broken + size) // LINE) * LINE
        self.slots = -(-self.semaphore(self.rounds, 0) // PAGE) * PAGE
        self.end = self.slot(0, size)

    def calls(self, half: int) -> int:
        """Start of the calls of all ranks, of every second one."""
        return LINE + half * self.size * CALL.size

    def waits(self, rank: int) -> int:
        """Start of the number that says what a rank waits for."""
        return self.lines + rank * LINE

    def semaphore(self, number: int, rank: int) -> int:
        """Start of the semaphore by which rank `rank` - 2^`number` signals `rank` in that round."""
        return self.waits(self.size) + (number * self.size + rank) * LINE

    def slot(self, half: int, rank: int) -> int:
        """Start of one of the two slots of a rank."""
        return self.slots + (2 * rank + half) * SLOT


segments: weakref.WeakSet[Segment] = weakref.WeakSet()


@when_lost
def give_up_all() -> None:
    """Break all segments of this rank, which has failed or knows of a loss: no peer is to wait for
    it."""
    for segment in list(segments):
        segment.give_up()


def disown_all() -> None:
    """This process has been forked from a rank, and is none."""
    for segment in list(segments):
        segment.fine = b""
    segments.clear()


os.register_at_fork(after_in_child=disown_all)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def open_segment(
    rank: int,
    hosts: Sequence[Sequence[int]],
    world: Sequence[int],
    exchange: Exchange,
    timeout: Callable[[], float],
) -> Segment | str:
    """The memory of this rank's host: all ranks of a group call this at the same point, and each
    host has its own.

    `hosts` are the ranks by host, `world` is the number of each in the world, `timeout` returns
    seconds. Where a single rank cannot have it, none has: then, on each rank, a reason is returned.
    """
    members = next(ranks for ranks in hosts if rank in ranks)
    pidfds: list[int] = []

    def prepare(memory: mmap.mmap) -> None:
        """Make the semaphores, before anybody else has the memory."""
        if len(members) > MOST_RANKS:
            raise ValueError(f"{len(members)} ranks are more than {MOST_RANKS}")
        layout = Layout(len(members))
        semaphores = Semaphores()
        start = ctypes.c_char.from_buffer(memory)
        for number, each in itertools.product(range(layout.rounds), range(len(members))):
            semaphores.make(ctypes.addressof(start) + layout.semaphore(number, each))

    def observe(pids: Sequence[int]) -> None:
        """Be able to see the end of these processes."""
        pidfds.extend(os.pidfd_open(pids[member]) for member in members if member != rank)

    memory = share(rank, members, Layout(len(members)).end, exchange, prepare, observe)
    if isinstance(memory, str):
        close_all(pidfds)
        return memory
    return Segment(
        [world[member] for member in members], members.index(rank), memory, pidfds, timeout
    )


def share(
    rank: int,
    members: Sequence[int],
    size: int,
    exchange: Exchange,
    prepare: Callable[[mmap.mmap], object] = lambda memory: None,
    observe: Callable[[Sequence[int]], object] = lambda pids: None,
) -> mmap.mmap | str:
    """New memory of `size` bytes, which the first of `members` makes and prepares. A reason where
    any rank has none.

    `observe` is called with the numbers of the processes of all that exchange.
    """
    own_namespace = digest(namespace_id("pid"))
    memory = None
    reason = ""
    descriptor = -1
    nonce = secrets.randbits(62)
    with contextlib.ExitStack() as files:
        try:
            if rank == members[0]:
                descriptor = os.memfd_create("playground", os.MFD_CLOEXEC)
                files.callback(os.close, descriptor)
                # a lack of memory is an error now, not a SIGBUS later
                os.posix_fallocate(descriptor, 0, size)
                memory = mmap.mmap(descriptor, size)
                memory[:8] = nonce.to_bytes(8, "little")
                prepare(memory)
        except (OSError, AttributeError, ValueError) as error:
            memory, reason, descriptor = None, str(error), -1
        processes = exchange([os.getpid(), descriptor, nonce, own_namespace])
        pid, descriptor, nonce, namespace = processes[members[0]]
        try:
            if not reason and memory is None:
                memory = attach(pid, descriptor, nonce, size, same=namespace == own_namespace)
            observe([number for number, *_ in processes])
        except (OSError, AttributeError, ValueError) as error:
            memory, reason = None, reason or str(error)
        agreed = exchange([int(memory is not None)])
    without = [number for number, (has_memory,) in enumerate(agreed) if not has_memory]
    if memory is not None and not without:
        return memory
    return reason or f"rank {without[0]} has none"


def attach(pid: int, descriptor: int, nonce: int, size: int, *, same: bool) -> mmap.mmap:
    """The memory that process `pid` has made. Raises `OSError` or `ValueError` if it cannot be
    reached."""
    if descriptor < 0 or not same:
        raise ValueError(
            "its first rank has none to share" if same else "ranks are in different containers"
        )
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(opened, size)
    finally:
        os.close(opened)
    if int.from_bytes(memory[:8], "little") != nonce:
        raise ValueError("what lies there is not the ranks' memory")
    return memory
