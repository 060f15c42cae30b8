"""The host a rank runs on: its cores, and what a rank asks of it, so that ranks do not stand in
each other's way.

None of that changes a result, and it serves the backend's own collectives as it does ours. A host
that refuses (gVisor knows one scheduling policy only) is not insisted upon; and with
PLAYGROUND_TUNING=0 in the environment nothing is asked for, which shows what it is worth.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from playground.base.untrusted import read_integer

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT, FROM_THE_HEAP = 128 * 2**20, 32 * 2**20
"""Bytes. The second is the largest that every glibc takes."""
SIMULATED_HOSTS = "PLAYGROUND_HOSTS"
"""The variable with which a world on one host is treated as one on several: its value is their
number."""

SIMULATED_GPUS = "PLAYGROUND_SIMULATED_GPU"
"""The variable with the number of simulated GPUs; set wherever there are any."""


def host_id() -> str:
    """Identity of this rank's host: ranks with the same one reach each other over loopback.

    So a container or a network namespace is a host of its own if it has a loopback interface of its
    own. With PLAYGROUND_HOSTS=H in the environment, the ranks of the world count as on H hosts,
    consecutive ones together, as evenly as they can be shared out. Raises `UsageError` if H is not
    a number from 1 to that of the ranks.
    """
    if SIMULATED_HOSTS in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        hosts = read_integer(SIMULATED_HOSTS, os.environ, 1, size + 1)
        return f"simulated host {rank * hosts // size}"
    return namespace_id("net")


def namespace_id(kind: str) -> str:
    """Identity of this machine since boot and of this process's namespace of that kind ("net",
    "pid"), which together are unlike any other's.

    Source: namespaces(7)
    """
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path(f"/proc/self/ns/{kind}")
    boot_id = boot.read_text().strip() if boot.exists() else ""
    inode = namespace.stat().st_ino if namespace.exists() else ""
    return f"{socket.gethostname()} {boot_id} {inode}"


def ranks_by_host(ids: Iterable[object]) -> tuple[tuple[int, ...], ...]:
    """For each host its ranks, in order, from what every rank says of its host, in rank order. The
    hosts are in the order of their first ranks."""
    by_id: dict[object, list[int]] = {}
    for rank, host in enumerate(ids):
        by_id.setdefault(host, []).append(rank)
    return tuple(map(tuple, by_id.values()))


def digest(identity: str) -> int:
    """A number of 64 bits that stands for an identity, where numbers alone are exchanged."""
    import hashlib

    return int.from_bytes(
        hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little", signed=True
    )


@functools.cache
def cores() -> int:
    """CPU cores this process may use when it first asks (its affinity mask, not what the machine
    has)."""
    return len(os.sched_getaffinity(0))


def threads_per_rank(local_ranks: int) -> int:
    """Each rank's share of the cores, at least one: more threads than cores only wait for each
    other."""
    return max(1, cores() // local_ranks)


def tuning_is_on() -> bool:
    return os.environ.get("PLAYGROUND_TUNING") != "0"


def use_batch_scheduling() -> None:
    """Ask the scheduler not to interrupt a thread of this process merely because another one has
    woken up (Linux).

    A thread that sends through gloo holds a lock, and gloo's I/O thread, as long as it cannot have
    that lock, tries again and again. Interrupted at the wrong moment, the sender then waits for a
    whole time slice (4 ms) while the other spins: most of what small messages cost where cores are
    scarce. Threads created later inherit this. Source: sched(7), SCHED_BATCH
    """
    if tuning_is_on():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_freed_memory() -> None:
    """Have malloc keep what is freed for what is asked for next, and not give it back to the kernel
    (glibc).

    Every step of training frees what the next one asks for. Given back, each page of it must be
    found and cleared again: for Net and 64 images up to 850 page faults a step, a fifth of its
    time. Source: mallopt(3)
    """
    if tuning_is_on() and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_MMAP_THRESHOLD, FROM_THE_HEAP)


def keep_to_one_core() -> None:
    """For a rank about to train: where several ranks share each core, let this thread stay on one
    of them (Linux).

    All ranks wait for the slowest at every step. Left to itself, the scheduler now and then has
    three of four ranks on one of two cores. Where ranks cannot be shared out evenly it is left to
    itself: then it has to move them about. The threads that the backend has already started are not
    bound: what they do is short and urgent.
    """
    if not tuning_is_on():
        return
    rank = int(os.environ["LOCAL_RANK"])
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    allowed = os.sched_getaffinity(0)
    if ranks > len(allowed) and ranks % len(allowed) == 0:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {sorted(allowed)[rank % len(allowed)]})
