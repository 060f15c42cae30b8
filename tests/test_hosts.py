"""The hosts that tests make on one machine: they reach each other, and no longer when a cable is cut."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from hosts import Network, ip
from processes import ENOUGH

SERVE = """
import socket
with socket.create_server(("", 5000)) as server:
    print("up", flush=True)
    server.accept()[0].sendall(socket.gethostname().encode())
"""
ASK = """
import socket, sys
try:
    print(socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])).recv(100).decode())
except OSError:
    print("no answer")
"""


def test_hosts_meet_until_a_cable_is_cut(hosts: Callable[..., Network]) -> None:
    network = hosts(2, rate="100mbit")
    first, second = network.hosts
    server = first.start(sys.executable, "-SE", "-c", SERVE)
    assert server.stdout
    assert server.stdout.readline() == "up\n"
    assert ask(second.start(sys.executable, "-SE", "-c", ASK, first.address, ENOUGH)) == "host-a\n"
    first.cut()
    assert ask(second.start(sys.executable, "-SE", "-c", ASK, first.address, 0.5)) == "no answer\n"
    second.start("sleep", 1000)
    network.remove()
    assert network.prefix not in ip("netns", "list")


def ask(program: subprocess.Popen[str]) -> str:
    return program.communicate(timeout=ENOUGH)[0]
