"""Sources of progress in this process while its main thread waits in an operation: its other
threads, those of C++ too, callbacks of futures, timers, remote calls, and data under way. Does not
import torch.

Sources: proc_pid_stat(5), proc_pid_task(5), tcp(7), Linux's include/uapi/linux/tcp.h
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from playground.base.connections import read_ports, tcp_connections
from playground.base.frames import in_package, is_standard
from playground.base.process_status import process_status
from playground.base.threads import running
from playground.base.upstream import find_interpreter, is_foreign, takes_remote_calls, torch_folder
from playground.explain.hang.idle import Sleep, find_sleep

BETWEEN_LOOKS = 0.1
"""Seconds between two looks that show whether something moves."""
OUR_WAITING_CODE = (
    in_package("base", ""),
    in_package("tap", ""),
    in_package("world", ""),
    in_package("explain", "hang", ""),
    in_package("algorithms", ""),
    in_package("lessons", "all_reduce", "lesson.py"),
)
TORCHS_WAITING_CODE = re.compile(
    r"distributed/\w+\.py|nn/parallel/distributed\.py|autograd/(__init__|graph)\.py"
    r"|(cuda|accelerator)/(__init__|streams)\.py|_tensor(_str)?\.py"
)
"""Code that, in an operation, waits for its other ranks and for nothing else: ours by folder, but
for the lesson whose functions are algorithms, and torch's by file."""
DISPATCHER = re.compile(r"_ops\.py|_library/\w+\.py")
"""Torch's code through which an operator of C++ is called. As Python's own, it waits on behalf of
its caller."""
NAMED = re.compile(r"pt_|gloo_|jemalloc_bg_thd|cuda|NCCL")
"""Names of torch's threads and of those of CUDA and NCCL, which act only if something is called or
comes in, and of the one that gives memory back, which pyarrow starts."""
LOOPS = re.compile(r"pt_tcpstore|gloo_tcp_loop|jemalloc_bg_thd")
"""Names of those that also wake up for other reasons: their work is seen in the sockets."""
OF_GPU = re.compile(r"cuda|NCCL|pt_nccl")
"""Names of the threads of CUDA, of NCCL, and of torch's watch over it: what they wait for is told
by the operations that have been called."""
POOLS = re.compile(r"lib(gomp|iomp|omp|\w*openblas|mkl|torch|c10|gloo)\w*[-.]")
"""Libraries whose threads compute for those that call them."""
C_LIBRARY = re.compile(
    r"(libc|libpthread|libm|libstdc\+\+|libgcc_s|ld-linux[-\w]*|libc-\S*)\.so|\["
)
TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
RUNNABLE = ([b"R"], [b"D"])
"""States of a thread that runs, waits for a core, or for a disk."""
INTERPRETER = 2**20
"""Bytes of the interpreter's own state, in which its lock is, at most."""
STACK = 2**15
"""Bytes of a thread's stack in which the function is looked for that the thread began in."""
TCP_INFO, TRANSFER = 11, struct.Struct("=24xI92x2Q")
"""unacked (packets), bytes_acked and bytes_received of struct tcp_info"""


@dataclass
class Clues:
    """What the flight recorder knows of this process, and the system does not tell."""

    callbacks: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """Those of futures, which have not run."""
    spinning: set[int] = field(default_factory=set)
    """The system's numbers of threads that wait for a real GPU, and may spin meanwhile."""
    waits: list[Callable[[int], tuple[int, ...] | None]] = field(default_factory=list)
    """Tell what the thread with this number waits for in CUDA: batches of operations; None if it
    does not, or if that is not known."""
    checks: list[Callable[[], None]] = field(default_factory=list)
    """Called before each look: they check that all the program has called is counted."""


clues = Clues()
"""Those of this process."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The activity of a process besides its main thread, at one moment."""

    may_act: str
    """Who may still call an operation, or what is not known of that: "what thread Thread-1 does";
    empty: nobody."""
    in_flight: bool
    """Whether data is on its way out of one of its sockets."""
    runnable: frozenset[str]
    """Threads that run, or wait for a core, a disk or the interpreter's lock, which this look holds
    now and then. What has arrived in a socket and is not read although all others sleep is read by
    none of them: nobody has asked for it yet."""
    transferred: tuple[list[int], ...]
    """Bytes that each of its sockets has sent and received."""
    ticks: tuple[bytes, ...]
    """The processor time of each of its threads but for those that also wake up for nothing."""
    asleep: frozenset[Sleep] = frozenset()
    """The threads that only others of this process can wake."""
    waits: tuple[int, ...] | None = None
    """The batches of operations that the main thread waits for in CUDA; None if it does not."""


class Besides(NamedTuple):
    """What may act in a process besides its main thread, by two looks."""

    may_act: str = ""
    """As `Activity.may_act`, or that a thread computes; empty: nobody."""
    moves: bool = False
    """Whether data is under way."""


def look(spare_port: int = 0) -> Activity | None:
    """The activity of this process; None if the system does not tell. The thread that calls this,
    and connections to or from `spare_port`, do not count."""
    with contextlib.suppress(OSError):
        return find_activity(spare_port)
    return None


def find_activity(spare_port: int) -> Activity:
    """As `look`. Raises `OSError`."""
    for check in clues.checks:
        check()
    sockets = [found for each in tcp_connections() for found in look_at(each, spare_port)]
    threads = [
        (thread, name, process_status(os.getpid(), "task", thread))
        for thread, name in list_threads()
    ]
    actor, asleep = find_actor([thread for thread, name, _ in threads if not NAMED.match(name)])
    main = threading.main_thread().native_id or 0
    waiting = next((found for each in clues.waits if (found := each(main)) is not None), None)
    return Activity(
        may_act=(waiting is None and find_visitor()) or actor,
        in_flight=any(unacked for unacked, *_ in sockets),
        runnable=frozenset(
            thread
            for thread, name, status in threads
            if not (OF_GPU.match(name) or int(thread) in clues.spinning)
            and (status[:1] in RUNNABLE or waits_for_interpreter(read_call(thread)))
        ),
        transferred=tuple(sorted(transferred for _, *transferred in sockets)),
        ticks=tuple(
            b"/".join(status[11:13])
            for thread, name, status in threads
            if not (LOOPS.match(name) or OF_GPU.match(name) or int(thread) in clues.spinning)
        ),
        asleep=frozenset(asleep),
        waits=waiting,
    )


def compare(before: Activity | None, now: Activity | None) -> Besides:
    """What may still act, by two looks; None is one that could not be taken."""
    if before is None or now is None:
        return Besides("what it does, as it gives no answer", True)
    rest = before.ticks == now.ticks and before.asleep == now.asleep
    computes = "" if rest else "what its threads compute"
    # A thread that sleeps in one of the looks has nothing to do; one that gets no core may have.
    starved = before.runnable & now.runnable
    moves = (
        before.in_flight or now.in_flight or before.transferred != now.transferred or bool(starved)
    )
    return Besides(before.may_act or now.may_act or computes, moves)


def look_at(connection: socket.socket, spare_port: int) -> Iterator[tuple[int, int, int]]:
    """How many packets the other end has not acknowledged, and how many bytes were sent and
    received."""
    with contextlib.suppress(OSError):  # it has been closed
        if spare_port not in read_ports(connection):
            information = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
            yield TRANSFER.unpack_from(information.ljust(TRANSFER.size, b"\0"))


def list_threads() -> Iterator[tuple[str, str]]:
    """The numbers and names of this process's threads, as the system knows them, without the one
    that calls this."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            if int(thread) != threading.get_native_id():
                yield thread, Path(f"/proc/self/task/{thread}/comm").read_text().strip()


def find_visitor() -> str:
    """What the main thread runs, and may wait for, inside an operation that it is in: a hook of
    backward, a handler of a signal. Empty if it stands in that operation itself."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    # Python's own modules and torch's dispatcher wait on behalf of their callers
    while frame is not None and is_between(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or waits_for_ranks(frame.f_code.co_filename):
        return ""
    code = frame.f_code
    return f"what {os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name} waits for"


@functools.cache
def waits_for_ranks(path: str) -> bool:
    return path.startswith(OUR_WAITING_CODE) or bool(
        TORCHS_WAITING_CODE.fullmatch(place_in_torch(path))
    )


@functools.cache
def is_between(path: str) -> bool:
    return is_standard(path) or bool(DISPATCHER.fullmatch(place_in_torch(path)))


def place_in_torch(path: str) -> str:
    """The path of one of torch's files in its folder; empty for others."""
    folder = os.path.join(torch_folder(), "")
    return path.removeprefix(folder) if path.startswith(folder) else ""


def find_actor(threads: list[str]) -> tuple[str, list[Sleep]]:
    """A source of operations in this process besides its main thread, such as these threads; and
    the threads that are none as long as they sleep."""
    if clues.callbacks:
        return "whether a callback of a future is to run", []
    if any(signal.getitimer(timer)[0] for timer in TIMERS):
        return "what it does when its timer goes off", []
    if takes_remote_calls():
        return "whether a remote call comes", []
    main, frames = threading.main_thread(), sys._current_frames()
    # A thread of C++ that has run a callback stays known to Python, and runs nothing there.
    known = {
        each.ident: each for each in threading.enumerate()
        if each.ident in frames or not is_foreign(each)
    }  # fmt: skip
    monitor = getattr(sys.modules.get("tqdm._monitor"), "TMonitor", ())
    ours = {*running.values()}
    asleep = []
    for ident in {*known, *frames} - {main.ident} - {each.ident for each in ours}:
        if isinstance(thread := known.get(ident), monitor):
            continue
        sleep = find_sleep(thread, frames[ident]) if thread and ident in frames else None
        if sleep is None:
            return f"what thread {thread.name if thread else 'of _thread'} does", []
        asleep.append(sleep)
    python = {str(each.native_id) for each in known.values()}
    python |= {str(each.native_id) for each in ours}
    foreign = any(thread not in python and not is_pool(thread) for thread in threads)
    return "what a thread of C or C++ does" if foreign else "", asleep


def is_pool(thread: str) -> bool:
    """Whether a thread belongs to a pool that computes for others: it began, and is, in one of
    their libraries."""
    # the thread has ended or runs, or this system does not tell where it is
    with contextlib.suppress(OSError, ValueError, IndexError):
        *_, stack, place = (int(word, 16) for word in read_call(thread)[1:])
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(stack)
            content = memory.read(STACK)
        words = {place, *struct.unpack(f"={len(content) // 8}Q", content[: len(content) // 8 * 8])}
        libraries = {library for library in find_libraries(words) if not C_LIBRARY.match(library)}
        return bool(libraries) and all(POOLS.match(library) for library in libraries)
    return False


def read_call(thread: str) -> list[str]:
    """The system call that a thread is in: its number, six arguments, the stack's end, the place in
    the code. Less of one that runs, and nothing where the system does not tell."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/task/{thread}/syscall").read_text().split()
    return []


def waits_for_interpreter(call: list[str]) -> bool:
    """Whether the thread in this call waits for the interpreter's lock: it goes on as soon as it
    has that."""
    return len(call) > 1 and 0 <= int(call[1], 16) - find_interpreter() < INTERPRETER


def find_libraries(addresses: set[int]) -> set[str]:
    """The names of the files in whose code these addresses lie; "" for code that is in no file."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, rights, _, _, _, *name = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in area.split("-"))
        if "x" in rights and any(first <= address < last for address in addresses):
            found.add("".join(name).rpartition("/")[2])
    return found
