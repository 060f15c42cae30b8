"""Other users of this machine: none is among the ranks of a world, and none can come while its
function runs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import ENOUGH, free_port
from ranks import TORCH
from torch.distributed import rpc
from torch.distributed.device_mesh import init_device_mesh

import playground
from playground import RankFailed
from playground.base import strangers
from playground.base.connections import gloo_sockets, is_listening
from playground.base.socket_filter import NOTHING, has_filter, put_filter
from playground.base.strangers import StrangerConnected, shut_out_strangers
from playground.world.rendezvous.rendezvous import listen

launch = partial(playground.launch, fresh=True)
NOBODY = 65534
"""The id of a user who owns nothing."""
as_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(autouse=True)
def doors_can_be_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            put_filter(server, NOTHING)
        except PermissionError:
            pytest.skip("this system lets only root filter what arrives at a socket")


@contextlib.contextmanager
def stranger(port: int) -> Iterator[None]:
    """A process of another user that connects to this port as soon as it can, and stays."""
    child = os.fork()
    if child == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        while True:
            # another user may not import what more needs
            with contextlib.suppress(OSError), socket.socket() as coming:
                coming.connect(("127.0.0.1", port))
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
        # loopback takes a connection, or refuses it, before this process goes on
        with socket.create_connection(("127.0.0.1", port), timeout=0.02):
            return True
    except (TimeoutError, ConnectionRefusedError):
        # a thread closes the sockets of a group that was destroyed
        return False


@as_another_user
def test_a_stranger_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        stranger(port := server.getsockname()[1]),
    ):
        connection, address = server.accept()
        with (
            connection,
            pytest.raises(
                StrangerConnected, match=rf":{address[1]} .* another user \(id {NOBODY}\)"
            ),
        ):
            shut_out_strangers(port)


def test_whoever_waits_to_be_accepted_is_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "ACCEPT_LIMIT", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        pytest.raises(StrangerConnected, match="is not accepted"),
    ):
        shut_out_strangers(server.getsockname()[1])


@as_another_user
def test_a_world_that_a_stranger_has_come_to_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(
        "playground.world.launcher.launch.listen", lambda host, _: listen(host, int(port))
    )
    expected = rf"(?s)^rank 0 of 2 is not alone .* another\suser \(id {NOBODY}\)\. Run it again"
    with stranger(int(port)), pytest.raises(RankFailed, match=expected):
        launch(sum_by_groups, 2)


def sum_by_groups(rank: int, size: int) -> list[float]:
    """In the world, in groups that are made in every way that this torch knows of gloo, and in a
    world that the function forms itself."""
    sums = []
    ways: list[Callable[[], Any]] = [
        lambda: None,
        lambda: dist.new_group(list(range(size))),
        lambda: init_device_mesh("cpu", (1, size)).get_group(1),
        lambda: dist.init_process_group("gloo"),
    ]
    if TORCH >= (2, 15):
        ways.insert(3, lambda: dist.split_group(split_ranks=[[*range(size)]]))
    for make in ways:
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=make())
        sums.append(tensor.item())
        ports = {each.getsockname()[1] for each in gloo_sockets() if is_listening(each)}
        assert ports
        assert not any(map(can_connect, ports))
    return sums


def test_nobody_can_connect_to_ranks_while_their_function_runs() -> None:
    assert launch(sum_by_groups, 3) == [[6.0] * (4 + (TORCH >= (2, 15)))] * 3


def serve_while_groups_form(rank: int, size: int) -> int:
    """How many of the servers that another thread opens meanwhile take connections."""
    servers: list[socket.socket] = []
    done = threading.Event()

    def open_servers() -> None:
        while not (done.is_set() and servers):
            servers.append(socket.create_server(("127.0.0.1", 0)))
            done.wait(0.001)

    thread = threading.Thread(target=open_servers)
    thread.start()
    for _ in range(5):
        dist.new_group()
    done.set()
    thread.join()
    assert not any(map(has_filter, servers))
    return sum(can_connect(server.getsockname()[1]) for server in servers) - len(servers)


def test_sockets_of_the_function_are_left_alone() -> None:
    assert launch(serve_while_groups_form, 2) == [0, 0]


def come_to_the_store(rank: int, size: int) -> list[int]:
    """As under torchrun: before and after this rank has formed a world of its own."""
    found = []
    for again in range(2):
        if again:
            dist.init_process_group("gloo")
        store, *_ = next(dist.rendezvous("env://"))
        store.add("came", 1)
        dist.barrier()
        found.append(store.add("came", 0))
        dist.barrier()
    return found


def test_processes_of_the_ranks_come_to_the_store_later_too() -> None:
    assert launch(come_to_the_store, 2) == [[2, 4]] * 2


def add_by_rpc(rank: int, size: int) -> float:
    rpc.init_rpc(f"rank {rank}".replace(" ", "-"), rank=rank, world_size=size)
    total = rpc.rpc_sync(f"rank-{(rank + 1) % size}", torch.add, (torch.ones(1), rank))
    rpc.shutdown()
    return float(total)


def test_torchs_own_remote_calls_connect_beside_a_group() -> None:
    assert launch(add_by_rpc, 2) == [1.0, 2.0]


PING = bytes([0]) + struct.pack("I", 0x3C85F7CE) + bytes([13]) + struct.pack("I", 7)
"""A client's first words to a store of torch's, which answers the 7. Source: torch's
TCPStoreBackend.hpp"""


def ask_as_a_stranger(rank: int, size: int) -> list[bytes]:
    """What the store answers to a process of this user, and to one of another."""
    answers = []
    for user in (os.geteuid(), NOBODY):
        readable, writable = os.pipe()
        if (child := os.fork()) == 0:
            with contextlib.suppress(OSError):
                os.setresuid(user, user, user)
                with socket.socket() as asking:
                    asking.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
                    asking.sendall(PING)
                    os.write(writable, asking.recv(4))
            os._exit(0)
        os.close(writable)
        answers.append(os.read(readable, 4))
        os.close(readable)
        os.waitpid(child, 0)
    return answers


@as_another_user
def test_the_store_hears_no_stranger_later() -> None:
    assert launch(ask_as_a_stranger, 2) == [[struct.pack("I", 7), b""]] * 2
