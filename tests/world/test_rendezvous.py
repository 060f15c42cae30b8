"""Addresses and the interfaces towards them."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import pytest

from playground.world.rendezvous.rendezvous import (
    LOOPBACK_INTERFACE,
    Rendezvous,
    interface_towards,
    is_loopback,
    is_this_host,
    listen,
)
from playground.world.rendezvous.store import choose_interface


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("10.0.0.7", False),
        ("node7", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_every_loopback_address_is_this_host() -> None:
    assert is_this_host("127.0.0.1")
    assert is_this_host("127.0.0.2"), "though packets to it come from another"
    assert not is_this_host("192.0.2.1"), "nobody's: RFC 5737"


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its interfaces")
def test_the_interface_towards_a_host() -> None:
    assert interface_towards("127.0.0.1") == LOOPBACK_INTERFACE
    assert LOOPBACK_INTERFACE in os.listdir("/sys/class/net")
    assert interface_towards("no such host") is None


def test_the_users_choice_of_an_interface_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, gloo is told which leads to the others, and nccl looks for itself."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    elsewhere = Rendezvous(host="127.0.0.1", local=False)
    choose_interface(elsewhere)
    assert [os.environ.get(name) for name in names] == [LOOPBACK_INTERFACE, None]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    choose_interface(elsewhere)
    assert [os.environ.get(name) for name in names] == ["eth7", None]


def test_a_place_may_be_one_of_ipv6() -> None:
    assert Rendezvous(host="::1", port=29500).place == "[::1]:29500"
    assert Rendezvous(host="127.0.0.1", port=29500).place == "127.0.0.1:29500"
    with (
        contextlib.suppress(OSError),
        socket.create_server(("::1", 0), family=socket.AF_INET6),  # this host has it
        listen("::1", 0) as listener,
    ):
        assert listener.getsockname()[0] == "::1"
