"""Other users of this machine: none is among the ranks of a world, and none can come while its function runs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from processes import ENOUGH, free_port

import playground
from playground import RankFailed
from playground.runtime.meeting import connections
from playground.runtime.meeting.connections import (
    StrangerConnected,
    close_door,
    is_listening,
    open_sockets,
    shut_out_strangers,
    tcp_sockets,
)
from playground.runtime.meeting.rendezvous import listen

launch = partial(playground.launch, fresh=True)
NOBODY = 65534
"""The id of a user who owns nothing."""
as_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(autouse=True)
def doors_can_be_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            close_door(server)
        except PermissionError:
            pytest.skip("this system lets only root filter what arrives at a socket")


@contextlib.contextmanager
def stranger(port: int) -> Iterator[None]:
    """A process of another user that connects to this port as soon as it can, and stays."""
    child = os.fork()
    if child == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                time.sleep(ENOUGH)
                os._exit(0)
            time.sleep(0.001)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def can_connect(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.1):
            return True
    except (TimeoutError, ConnectionRefusedError):  # a thread closes the sockets of a group that was destroyed
        return False


def test_who_is_connected_stays_and_nobody_else_comes() -> None:
    known = {*open_sockets()}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as ours, server.accept()[0] as theirs:
            assert can_connect(port)
            server.accept()[0].close()
            shut_out_strangers(known)
            assert not can_connect(port)
            theirs.sendall(b"still here")
            assert ours.recv(10) == b"still here"


@as_another_user
def test_a_stranger_is_named() -> None:
    known = {*open_sockets()}
    with socket.create_server(("127.0.0.1", 0)) as server, stranger(server.getsockname()[1]):
        connection, address = server.accept()
        with connection, pytest.raises(StrangerConnected, match=rf":{address[1]} .* another user \(id {NOBODY}\)"):
            shut_out_strangers(known)


def test_whoever_waits_to_be_accepted_is_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ACCEPT_LIMIT", 0.1)
    known = {*open_sockets()}
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        pytest.raises(StrangerConnected, match="is not accepted"),
    ):
        shut_out_strangers(known)


@as_another_user
def test_a_world_that_a_stranger_has_come_to_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr("playground.runtime.launcher.launch.listen", lambda host, _: listen(host, int(port)))
    expected = rf"^rank 0 of 2 is not alone .* another user \(id {NOBODY}\)$"
    with stranger(int(port)), pytest.raises(RankFailed, match=expected):
        launch(sum_by_groups, 2)


def sum_by_groups(rank: int, size: int) -> list[float]:
    """In the world, in a group of its own, and in one that the function forms itself."""
    sums = []
    for make in (None, partial(dist.new_group, list(range(size))), partial(dist.init_process_group, "gloo")):
        group = make() if make else None
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
        ports = {each.getsockname()[1] for each in tcp_sockets() if is_listening(each)}
        assert ports
        assert not any(map(can_connect, ports))
    return sums


def test_nobody_can_connect_to_ranks_while_their_function_runs() -> None:
    assert launch(sum_by_groups, 3) == [[6.0] * 3] * 3
