"""The third tier: several hosts, over plain TCP. The same command runs on each of them.

Each listens at one port and greets the others, again and again, until all have answered it and it has answered all, or
the time is up. An answer is a line: the host's name and the versions of packages.
"""

from __future__ import annotations

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
Versions = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class HostsFacts:
    """The results of this host's greetings, by the names of the others."""

    versions: Mapping[str, Versions]
    """Versions of packages on each host that answers, in the order of the list."""
    failures: Mapping[str, str]
    """Why the other hosts do not answer."""
    unheard: Sequence[str]
    """Hosts that answer, and have not reached this one."""


class Handler(socketserver.StreamRequestHandler):
    """Answers one greeting: the name of the host that greets, in JSON."""

    server: Listener

    def handle(self) -> None:
        self.connection.settimeout(LIMIT)
        name = json.loads(self.rfile.readline(2**10))
        self.wfile.write(json.dumps([self.server.name, self.server.versions]).encode() + b"\n")
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
    """The versions of a host, empty if it does not answer, and why not."""
    try:
        with socket.create_connection((name, listener.port), timeout=LIMIT) as connection:
            connection.sendall(json.dumps(listener.name).encode() + b"\n")
            there, versions = json.loads(connection.makefile("rb").readline())
            return (versions, "") if there == name else ({}, f"it goes by the name {there}")
    except (OSError, ValueError, TypeError) as failure:
        return {}, getattr(failure, "strerror", None) or str(failure) or "no answer"


def meet(listener: Listener, names: Sequence[str], timeout: float) -> HostsFacts:
    """Greet the others until all have answered and been answered, for `timeout` seconds at most."""
    end, others = time.monotonic() + timeout, [name for name in names if name != listener.name]
    versions: dict[str, Versions] = {listener.name: listener.versions}
    failures = dict.fromkeys(others, "")
    with ThreadPoolExecutor(len(others)) as pool:
        while True:
            left = [name for name in others if name not in versions]
            for name, (said, failure) in zip(left, pool.map(lambda name: greet(listener, name), left), strict=True):
                versions |= {name: said} if said else {}
                failures[name] = failure
            if {*others} <= listener.heard & versions.keys() or time.monotonic() > end:
                break
            time.sleep(INTERVAL)
    unheard = [name for name in others if name in versions and name not in listener.heard]
    return HostsFacts(
        versions={name: versions[name] for name in names if name in versions},
        failures={name: why for name, why in failures.items() if why},
        unheard=unheard,
    )


def check_answers(found: HostsFacts) -> Iterator[Finding]:
    rule = "all hosts run this command at the same time, with the same list of hosts, and every rank connects to others"
    fix = "start it there; have its firewall accept TCP from the others; compare routes"
    for name, why in found.failures.items():
        yield error(f"{name} does not answer: {why}", rule, fix)
    for name in found.unheard:
        yield error(f"{name} answers, and does not reach this host", rule, fix.replace("its", "this host's"))


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
