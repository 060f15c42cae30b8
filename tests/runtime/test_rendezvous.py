"""Addresses and the interfaces towards them."""

from __future__ import annotations

import os
import sys

import pytest

from playground.runtime.rendezvous.rendezvous import (
    LOOPBACK_INTERFACE,
    interface_towards,
    is_loopback,
)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.0.2", True), ("::1", True), ("10.0.0.7", False), ("node7", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its interfaces")
def test_the_interface_towards_a_host() -> None:
    assert interface_towards("127.0.0.1") == LOOPBACK_INTERFACE
    assert LOOPBACK_INTERFACE in os.listdir("/sys/class/net")
    assert interface_towards("no such host") is None
