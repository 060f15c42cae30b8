"""The third tier: several hosts, over plain TCP. The same command runs on each of them.

Each listens at one port and greets the others, again and again, until all have answered it and it has answered all, or
the time is up. An answer is a line, the versions of packages, and `PADDING`: a link may lose large packets alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import platform
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from playground.runtime.errors import UsageError
from playground.runtime.meeting.rendezvous import is_loopback
from playground.tools.doctor import Finding, error, find_checks, warning
from playground.tools.doctor.machine import resolve
from playground.tools.doctor.software import version_of

INTERVAL, LIMIT = 0.1, 2.0
"""Seconds between two rounds of greetings, and until one is given up."""
PADDING = bytes(2**16)
STUCK = "large packets do not arrive"
Versions = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class HostsFacts:
    """The results of this host's greetings, by the names of the others."""

    versions: Mapping[str, Versions]
    """Versions of packages on each host that answers, this one first."""
    failures: Mapping[str, str]
    """Why the other hosts do not answer, or not completely."""
    unheard: Sequence[str]
    """Hosts that answer, and have not reached this one."""


class Handler(socketserver.StreamRequestHandler):
    """Answers one greeting: the name of the host that greets, in JSON."""

    server: Listener

    def handle(self) -> None:
        self.connection.settimeout(LIMIT)
        name = json.loads(self.rfile.readline(2**10))
        self.wfile.write(json.dumps([self.server.name, self.server.versions]).encode() + b"\n")
        with contextlib.suppress(TimeoutError):  # the other host says so
            self.wfile.write(PADDING)
        self.server.heard.add(name)


class Listener(socketserver.ThreadingTCPServer):
    """Listens on this host, which goes by `name`."""

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

    def __init__(self, name: str, address: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), Handler)
        self.name, self.port = name, int(self.server_address[1])
        self.versions = {"python": platform.python_version()}
        self.versions |= {package: version_of(package) or "none" for package in ("torch", "playground")}
        self.heard: set[str] = set()
        """The hosts that have got an answer."""
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A peer that has sent something else, or has left, gets no answer."""


def listen(names: Sequence[str], port: int) -> Listener:
    """The listener of this host: the first of `names` whose address it can listen at. Raises `UsageError` for none."""
    addresses, taken = [([*resolve(name), ""])[0] for name in names], ""
    for name, address in zip(names, addresses, strict=True):
        misleads = is_loopback(address) and not all(map(is_loopback, addresses))
        try:
            if address:
                return Listener(name, "" if misleads else address, port)
        except OSError as failure:
            taken = taken or name * (failure.errno == errno.EADDRINUSE)
    if taken:
        raise UsageError(f"port {port} of {taken} is taken: choose another with --port, the same on all hosts")
    raise UsageError(f"--hosts {','.join(names)}: none of them is this machine; name it as the others reach it")


def greet(listener: Listener, name: str) -> tuple[Versions, str]:
    """The versions of a host, empty if it does not answer, and what is wrong; empty for nothing."""
    try:
        with socket.create_connection((name, listener.port), timeout=LIMIT) as connection:
            connection.sendall(json.dumps(listener.name).encode() + b"\n")
            answer = connection.makefile("rb")
            there, versions = json.loads(answer.readline())
            if there != name:
                return {}, f"it goes by the name {there}"
            try:
                arrived = len(answer.read())
            except TimeoutError:
                arrived = 0
            return versions, "" if arrived == len(PADDING) else STUCK
    except (OSError, ValueError, TypeError) as failure:
        return {}, getattr(failure, "strerror", None) or str(failure) or "no answer"


def meet(listener: Listener, names: Sequence[str], timeout: float) -> HostsFacts:
    """Greet the others until all have answered and been answered, for `timeout` seconds at most."""
    end, others = time.monotonic() + timeout, [name for name in names if name != listener.name]
    versions: dict[str, Versions] = {listener.name: listener.versions}
    failures = dict.fromkeys(others, "")
    left = others
    with ThreadPoolExecutor(len(others)) as pool:
        while True:
            for name, (said, failure) in zip(left, pool.map(lambda name: greet(listener, name), left), strict=True):
                versions |= {name: said} if said else {}
                failures[name] = STUCK if failure and failures[name] == STUCK else failure  # it may have left by now
            left = [name for name in others if failures[name]]
            if not (left or {*others} - listener.heard) or time.monotonic() > end:
                break
            time.sleep(INTERVAL)
    unheard = [name for name in others if name in versions and name not in listener.heard]
    return HostsFacts(versions=versions, failures={name: failures[name] for name in left}, unheard=unheard)


def check_answers(found: HostsFacts) -> Iterator[Finding]:
    rule = "all hosts run this command at the same time, with the same list of hosts, and every rank connects to others"
    fix = "start it there; have its firewall accept TCP from the others; compare routes"
    for name, why in found.failures.items():
        if why != STUCK:
            yield error(f"{name} does not answer: {why}", rule, fix)
    for name in found.unheard:
        yield error(f"{name} answers, and does not reach this host", rule, fix.replace("its", "this host's"))


def check_large_packets(found: HostsFacts) -> Iterator[Finding]:
    for name in (name for name, why in found.failures.items() if why == STUCK):
        rule = "each switch and tunnel on the way takes packets as large as the hosts' MTU"
        fix = "ip link set NAME mtu 1400, and less until it passes; or correct the switch or tunnel"
        yield error(f"from {name} small packets arrive and large ones do not", rule, fix)


def check_host_versions(found: HostsFacts) -> Iterator[Finding]:
    (here, ours), *others = found.versions.items()
    for package, version in ours.items():
        if differing := [f"{said.get(package)} on {name}" for name, said in others if said.get(package) != version]:
            saw = f"{package} {version} on {here}, but {', '.join(differing)}"
            yield warning(saw, "all ranks run the same software", f"install one version of {package} on all hosts")


CHECKS = find_checks(globals())


def summarize(found: HostsFacts) -> str:
    """The hosts that answer, in a few words."""
    return f"{len(found.versions)} of {len({*found.versions, *found.failures})} hosts answer"
