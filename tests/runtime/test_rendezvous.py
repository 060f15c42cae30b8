"""Init methods and addresses: how they are read, and what is refused."""

from __future__ import annotations

import os
import sys

import pytest

from playground.runtime import UsageError
from playground.runtime.meeting.rendezvous import (
    LOOPBACK_INTERFACE,
    interface_towards,
    is_loopback,
    parse_init_method,
)


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("tcp://127.0.0.1:29500", ("tcp", "127.0.0.1", 29500, "")),
        ("tcp://[::1]:29500", ("tcp", "::1", 29500, "")),
        ("file:///tmp/meet", ("file", "", 0, "/tmp/meet")),
    ],
)
def test_methods_are_taken_apart(method: str, parts: tuple[str, str, int, str]) -> None:
    assert parse_init_method(method) == parts


@pytest.mark.parametrize(
    "method",
    [
        "tcp://host", "tcp://:1", "tcp://h:port", "tcp://h:1/path", "tcp://h:1?rank=0", "tcp://h:1#0", "tcp://me@h:1",
        "file://", "file://host/x", "file:x", "file:///tmp/meet?rank=0", "mpi://",
    ],
)  # fmt: skip
def test_other_methods_are_refused(method: str) -> None:
    with pytest.raises(UsageError, match="--init-method"):
        parse_init_method(method)


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
