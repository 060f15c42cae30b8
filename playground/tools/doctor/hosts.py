"""The third tier: several hosts, over plain TCP. The same command runs on each of them.

Each listens at one port and greets the others, again and again, until all have answered it and it
has answered all, or the time is up. An answer is a line: the host's name.
"""

from __future__ import annotations

import errno
import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from playground.base.errors import UsageError
from playground.tools.doctor.checks import Fault, error
from playground.tools.doctor.machine import resolve
from playground.world.rendezvous.rendezvous import is_loopback

INTERVAL, LIMIT = 0.1, 2.0
"""Seconds between two rounds of greetings, and until one is given up."""


@dataclass(frozen=True, kw_only=True)
class HostsFacts:
    """The results of this host's greetings."""

    failures: dict[str, str]
    """By the names of the others: why a host does not answer; empty if it does."""
    unheard: Sequence[str]
    """Hosts that answer, and have not reached this one."""


class Handler(socketserver.StreamRequestHandler):
    """Answers one greeting: the name of the host that greets, in JSON."""

    server: Listener

    def handle(self) -> None:
        self.connection.settimeout(LIMIT)
        name = json.loads(self.rfile.readline(2**10))
        self.wfile.write(json.dumps(self.server.name).encode() + b"\n")
        self.server.heard.add(name)


class Listener(socketserver.ThreadingTCPServer):
    """Listens on this host, which goes by `name`."""

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

    def __init__(self, name: str, address: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), Handler)
        self.name = name
        self.port = int(self.server_address[1])
        self.heard: set[str] = set()
        """The hosts that have got an answer."""
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A peer that has sent something else, or has left, gets no answer."""


def listen(names: Sequence[str], port: int) -> Listener:
    """The listener of this host: the first of `names` whose address it can listen at. Raises
    `UsageError` for none."""
    addresses = [next(iter(resolve(name)), "") for name in names]
    taken = ""
    for name, address in zip(names, addresses, strict=True):
        misleads = is_loopback(address) and not all(map(is_loopback, addresses))
        try:
            if address:
                return Listener(name, "" if misleads else address, port)
        except OSError as failure:
            if failure.errno == errno.EADDRINUSE and not taken:
                taken = name
    if taken:
        raise UsageError(
            f"port {port} of {taken} is taken: choose another with --port, the same on all hosts"
        )
    raise UsageError(
        f"--hosts {','.join(names)}: none of them is this machine; name it as the others reach it"
    )


def greet(listener: Listener, name: str) -> str:
    """Why a host does not answer; empty if it does."""
    try:
        with socket.create_connection((name, listener.port), timeout=LIMIT) as connection:
            connection.sendall(json.dumps(listener.name).encode() + b"\n")
            there = json.loads(connection.makefile("rb").readline())
            return "" if there == name else f"it goes by the name {there}"
    except (OSError, ValueError) as failure:
        return getattr(failure, "strerror", None) or str(failure) or "no answer"


def meet(listener: Listener, names: Sequence[str], timeout: float) -> HostsFacts:
    """Greet the others until all have answered and been answered, for `timeout` seconds at most."""
    end, others = time.monotonic() + timeout, [name for name in names if name != listener.name]
    failures = dict.fromkeys(others, "not greeted")
    with ThreadPoolExecutor(len(others)) as pool:
        while True:
            left = [name for name in others if failures[name]]
            failures |= zip(left, pool.map(lambda name: greet(listener, name), left), strict=True)
            all_met = listener.heard.issuperset(others) and not any(failures.values())
            if all_met or time.monotonic() > end:
                break
            time.sleep(INTERVAL)
    unheard = [name for name in others if not failures[name] and name not in listener.heard]
    return HostsFacts(failures=failures, unheard=unheard)


def check_answers(found: HostsFacts) -> Iterator[Fault]:
    rule = (
        "all hosts run this command at the same time, with the same list of hosts, and every "
        "rank connects to others"
    )
    fix = "start it there; have its firewall accept TCP from the others; compare routes"
    for name, why in found.failures.items():
        if why:
            yield error(f"{name} does not answer: {why}", rule, fix)
    for name in found.unheard:
        yield error(
            f"{name} answers, and does not reach this host", rule, fix.replace("its", "this host's")
        )


CHECKS = (check_answers,)


def summarize(found: HostsFacts) -> str:
    """The hosts that answer, in a few words."""
    silent = sum(map(bool, found.failures.values()))
    return f"{1 + len(found.failures) - silent} of {1 + len(found.failures)} hosts answer"
