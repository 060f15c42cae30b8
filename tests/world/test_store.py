"""At a store that has seen earlier worlds, or what was left of them, the ranks of a new one find
each other."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from processes import ENOUGH, free_port

from playground.base.errors import RendezvousTimeout
from playground.world.rendezvous.environment import RankEnv
from playground.world.rendezvous.rendezvous import Rendezvous, Server
from playground.world.rendezvous.store import (
    await_everyone,
    await_number,
    connect,
    connect_as_client,
    number_attempt,
    set_missing,
)

Serve = Callable[[], dist.TCPStore]
SHORT, LONG = timedelta(seconds=0.2), timedelta(seconds=ENOUGH)


@pytest.fixture
def torchrun_store() -> Iterator[Serve]:
    """A connection to one store, which is served as long as the test runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    yield lambda: dist.TCPStore("127.0.0.1", port, timeout=LONG, wait_for_workers=False)
    del server


def agree_on_attempt(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> tuple[int, bool]:
    return (
        (await_number(store, rank, timeout), True) if rank else number_attempt(store, size, timeout)
    )


def agree(serve: Serve, size: int, timeout: timedelta = LONG) -> list[tuple[int, bool]]:
    """What every rank of a new world finds."""
    with ThreadPoolExecutor(size) as ranks:
        return list(
            ranks.map(lambda rank: agree_on_attempt(serve(), rank, size, timeout), range(size))
        )


def test_every_start_has_a_number_of_its_own(torchrun_store: Serve) -> None:
    found = [agree(torchrun_store, size) for size in (3, 3, 2, 4, 1)]
    assert found == [
        [(number, True)] * size for number, size in enumerate((3, 3, 2, 4, 1), start=1)
    ]


def test_who_came_and_is_gone_holds_nobody_up(torchrun_store: Serve) -> None:
    for rank in (1, 2, 2):  # their world never began, for rank 0 was killed
        with pytest.raises(RuntimeError):
            agree_on_attempt(torchrun_store(), rank, 3, SHORT / 4)
    with ThreadPoolExecutor(3) as ranks:
        first = ranks.submit(agree_on_attempt, torchrun_store(), 0, 3, LONG)
        torchrun_store().wait(["attempts"])  # rank 0 has found only words of the dead
        others = [
            ranks.submit(agree_on_attempt, torchrun_store(), rank, 3, LONG) for rank in (2, 1)
        ]
        assert [each.result() for each in (first, *others)] == [(1, True)] * 3


def test_a_rank_0_that_waited_in_vain_leaves_nothing_to_the_next(torchrun_store: Serve) -> None:
    assert agree_on_attempt(torchrun_store(), 0, 2, SHORT) == (1, False)
    assert agree(torchrun_store, 2) == [(2, True)] * 2


def place(rank: int, size: int, rendezvous: Rendezvous) -> RankEnv:
    return RankEnv(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous)


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1-2"), (1, "rank 0")])
def test_who_did_not_come_is_named(torchrun_store: Serve, rank: int, missing: str) -> None:
    env = place(rank, 3, Rendezvous(port=torchrun_store().port, server=Server.TORCHRUN))
    with pytest.raises(
        RendezvousTimeout, match=rf"waited 0\.2 s at 127\.0\.0\.1:\d+: {missing} did not come"
    ):
        await_everyone(connect(env, None, SHORT), env, SHORT)


def test_rank_0_tells_whoever_comes_later_that_it_has_given_up(torchrun_store: Serve) -> None:
    env = place(0, 2, Rendezvous(port=torchrun_store().port, server=Server.TORCHRUN))
    assert connect(env, None, SHORT).get("missing") == b"rank 1"


def test_a_start_does_not_see_what_an_earlier_one_has_left(torchrun_store: Serve) -> None:
    env = place(0, 1, Rendezvous(port=torchrun_store().port, server=Server.TORCHRUN))
    for _ in range(2):
        store = connect(env, None, LONG)
        assert not store.check(["loss"])
        other = connect_as_client(env, LONG)
        assert not other.check(["loss"])
        other.set("loss", "of this start")
        assert store.check(["loss"])


def test_who_was_to_serve_the_store_is_named() -> None:
    envs = [place(1, 2, Rendezvous(port=int(free_port()), server=server)) for server in Server]
    with ThreadPoolExecutor() as pool:  # each waits
        failures = [
            pool.submit(connect, env, None, SHORT).exception(timeout=ENOUGH) for env in envs
        ]
    assert [type(failure) for failure in failures] == [RendezvousTimeout] * 3
    assert ": rank 0, which is to serve the store there, did not come" in str(failures[0])
    assert ": torchrun, which serves the store, did not come" in str(failures[1])
    assert ": the process that serves the store did not come" in str(failures[2])


def test_of_many_missing_ranks_the_first_are_named() -> None:
    store = dist.HashStore()
    set_missing(store, place(0, 12, Rendezvous()))
    assert store.get("missing") == b"ranks 1-8, \xe2\x80\xa6"
