"""The store at which ranks meet, and by which they part: all come, or it is known who did not; all
leave together.

Source: https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from playground.base.errors import RendezvousTimeout
from playground.base.ranks import name_ranks
from playground.world.backends import BACKENDS
from playground.world.rendezvous import keys
from playground.world.rendezvous.environment import RankEnv
from playground.world.rendezvous.rendezvous import (
    LOOPBACK_INTERFACE,
    Rendezvous,
    Server,
    interface_towards,
)

POLL_INTERVAL = 0.01
LEAVE_TIMEOUT = timedelta(seconds=15)
"""How long rank 0 waits for the others to leave: longer than a launcher does, who then knows whom
it waited for."""
MAX_NAMED = 8
"""Number of missing ranks that are named: more would not fit a line."""
READ_GRACE = 0.5
"""Seconds for which rank 0, when it has given up, still serves the store: all others read there who
is missing."""
attempts: list[int] = []
"""The numbers of the worlds that this process has entered at a store that torchrun serves, the
newest last. Of the process, as torchrun's store is one for all of them: each later connection to
it, of whatever thread, is to the world that was entered last."""


def connect(env: RankEnv, listener: socket.socket | None, timeout: timedelta) -> dist.Store:
    """The store of this rendezvous, through which the ranks find each other. It goes when the rank
    that serves it does.

    What torch does for env:// and tcp://, except that rank 0, who serves the store (on the
    `listener`, if it is handed one), does not wait here for the others. `await_everyone` does, and
    says who is missing. Raises `RendezvousTimeout` if the store is not served in time, and, at
    torchrun's, if rank 0 does not come in time.
    """
    rendezvous, size = env.rendezvous, env.size
    serves = rendezvous.server == Server.RANK_0 and env.rank == 0
    place = rendezvous.host, rendezvous.port, size
    fd = {"master_listen_fd": listener.detach()} if serves and listener else {}
    try:
        store = dist.TCPStore(
            *place, is_master=serves, timeout=timeout, wait_for_workers=False, **fd
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if serves:
            why = str(error).splitlines()[0]
            raise RendezvousTimeout(
                f"rank 0 of {size} cannot serve the store at {rendezvous.place}: {why}"
            ) from error
        raise not_come(env, timeout, rendezvous.server.value) from error
    is_torchruns = rendezvous.server == Server.TORCHRUN
    return enter_attempt(store, env, timeout) if is_torchruns else store


def enter_attempt(store: dist.Store, env: RankEnv, timeout: timedelta) -> dist.Store:
    """The part of torchrun's store for this start of the world, which has a number, the same on
    every rank. All must call this. Raises `RendezvousTimeout` if rank 0 does not come in time; rank
    0 tells the others who has not."""
    try:
        if env.rank == 0:
            attempt, everyone = number_attempt(store, env.size, timeout)
        else:
            attempt, everyone = await_number(store, env.rank, timeout), True
    except dist.DistNetworkError as error:
        raise lost_store(env) from error
    except RuntimeError as error:
        raise not_come(env, timeout, "rank 0") from error
    attempts.append(attempt)
    if not everyone:
        set_missing(of_this_attempt(store), env)
    return of_this_attempt(store)


def await_number(store: dist.Store, rank: int, timeout: timedelta) -> int:
    """Tell rank 0 that this process has come. The entry of an earlier process in this place is
    overwritten, and no other process gets the answer."""
    process = uuid.uuid4().hex
    store.set(keys.waits(rank), process)
    store.wait([keys.answer_to(process)], timeout)
    attempt = int(store.get(keys.answer_to(process)))
    store.add(keys.members_of(attempt), 1)
    return attempt


def number_attempt(store: dist.Store, size: int, timeout: timedelta) -> tuple[int, bool]:
    """Answer whoever waits until all others know the number; False if not all have come in time.
    The entry of a process that is gone is answered too, and so is the one that comes after it."""
    attempt, answered = store.add(keys.ATTEMPTS, 1), set[bytes]()
    end = time.monotonic() + timeout.total_seconds()
    while store.add(keys.members_of(attempt), 0) < size - 1:
        if time.monotonic() > end:
            return attempt, False
        waiting = {
            store.get(key) for rank in range(1, size) if store.check([key := keys.waits(rank)])
        }
        for process in waiting - answered:
            store.set(keys.answer_to(process.decode()), str(attempt))
        answered |= waiting
        time.sleep(POLL_INTERVAL)
    return attempt, True


def connect_as_client(env: RankEnv, timeout: timedelta) -> dist.Store:
    """The store that this process has connected to, by a connection of its own: what one thread
    waits for does not hold up another. Raises torch's errors."""
    place = env.rendezvous
    store = dist.TCPStore(place.host, place.port, env.size, timeout=timeout, wait_for_workers=False)
    return of_this_attempt(store) if place.server == Server.TORCHRUN else store


def of_this_attempt(store: dist.Store) -> dist.Store:
    """Its part for this start of the world: torchrun's store may have seen an earlier one."""
    return dist.PrefixStore(f"attempt {attempts[-1]}", store)


def choose_interface(rendezvous: Rendezvous) -> None:
    """Tell the backends, before they form a process group, which network interface leads to the
    other ranks."""
    for backend in BACKENDS.values():
        if rendezvous.local:
            os.environ[backend.interface_variable] = LOOPBACK_INTERFACE
        elif backend.trusts_host_name and (name := interface_towards(rendezvous.host)):
            os.environ.setdefault(backend.interface_variable, name)


def await_everyone(store: dist.Store, env: RankEnv, timeout: timedelta) -> None:
    """Return when every rank has come this far. If that takes too long, raise `RendezvousTimeout`:
    who is missing.

    A backend would wait for them as well, but without end (nccl), or without a word on who is
    missing (gloo).
    """
    store.set(keys.is_here(env.rank), "")
    if store.add(keys.HERE, 1) == env.size:
        store.set(keys.MISSING, "")
    try:
        store.wait([keys.MISSING], timeout)
    except dist.DistNetworkError as error:
        raise lost_store(env) from error
    except dist.DistStoreError:
        set_missing(store, env)
        if env.rank == 0:
            time.sleep(READ_GRACE)
    if who := store.get(keys.MISSING).decode():
        raise not_come(env, timeout, who)


def set_missing(store: dist.Store, env: RankEnv) -> None:
    """Tell everyone which ranks, besides this one, have not come. Whoever gives up first says it
    for all."""
    others = (rank for rank in range(env.size) if rank != env.rank)
    absent = [rank for rank in others if not store.check([keys.is_here(rank)])]
    more = ", …" if len(absent) > MAX_NAMED else ""
    store.set(keys.MISSING, name_ranks(absent[:MAX_NAMED]) + more)


def not_come(env: RankEnv, timeout: timedelta, who: str) -> RendezvousTimeout:
    waited = f"waited {timeout.total_seconds():g} s at {env.rendezvous.place}"
    return RendezvousTimeout(f"rank {env.rank} of {env.size} {waited}: {who} did not come")


def lost_store(env: RankEnv) -> RendezvousTimeout:
    place = env.rendezvous.place
    return RendezvousTimeout(
        f"rank {env.rank} of {env.size} lost the store at {place}: whoever served it has gone"
    )


def leave_together(store: dist.Store, rank: int, size: int) -> None:
    """Tell the others, in the store, that this rank has left; rank 0, who may be serving it, waits
    for all of them.

    They use it until they have left: nccl has threads that ask it whether the others are well.
    """
    # Results are in. If a rank has been killed since, its launcher says so.
    with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
        if store.add(keys.GONE, 1) == size:
            store.set(keys.EVERYONE_GONE, "")
        if rank == 0:
            store.wait([keys.EVERYONE_GONE], LEAVE_TIMEOUT)
