"""The third tier: several hosts, over plain TCP. The same command runs on each of them.

Each listens at one port and greets the others until it knows them all or the time is up. The first of them then leads:
it asks all for what they know of themselves, and has every pair of hosts measure its link, in rounds
in which no host takes part in two measurements. `explain` tells a slow host from a slow link. What may be asked of a
host is what `Handler` answers; it listens as long as the command runs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import socket
import socketserver
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from playground.measurement import Fields
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.meeting.environment import RankEnv
from playground.runtime.meeting.rendezvous import is_loopback
from playground.tools.doctor import Finding, error, find_checks, warning
from playground.tools.doctor.machine import family_of, resolve
from playground.tools.doctor.software import version_of

GREETING_INTERVAL, GREETING_LIMIT, ANSWER_LIMIT = 0.1, 1.0, 10.0
"""Seconds between two attempts to reach another host, until one is given up, and until a question is."""
FOLLOW_INTERVAL, SILENCE = 0.5, 30.0
"""Seconds between two looks whether the host that leads is still there; and without a question after which it is given
up, beyond the time for all to come."""
PINGS = 50
LATENCY_LIMIT, TRANSFER_SECONDS, TRANSFER_LIMIT = 2.0, 0.2, 1.0
"""Seconds for a ping of a link, for which it is filled, and until the next large packet must have arrived."""
CHUNK, REPEATS = bytes(2**18), 3
LIMITS, LEAST_EXCESS = {"bandwidth": 2.0, "latency": 4.0}, 2e-4
"""How many times slower than expected is slow, and the least latency (s) that matters."""
STUCK = "large packets do not arrive"
Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class HostsFacts:
    """What the host that leads has found out. Hosts go by their place in the list."""

    names: Sequence[str]
    leader: int = 0
    about: Mapping[int, Fields] = field(default_factory=dict)
    """What those that answer tell, by host: `name`, `versions` of packages, and `findings`."""
    silent: Mapping[int, str] = field(default_factory=dict)
    """What is known of those that do not."""
    links: Mapping[Pair, Fields] = field(default_factory=dict)
    """By (here, there), as measured here: the `latency`, seconds for a byte there and back, the least of many; the
    `bandwidth`, bytes per second that arrive here; the `problem`, why there is none, or no measurement at all."""

    def name(self, *hosts: int) -> str:
        """The name of a host, or of the link between two."""
        return "the link between " * (len(hosts) > 1) + " and ".join(self.names[host] for host in hosts)

    @property
    def theirs(self) -> list[Finding]:
        """What the other hosts have found out about themselves."""
        others = [(self.names[index], about) for index, about in self.about.items() if index != self.leader]
        return [replace(finding, host=name) for name, about in others for finding in about["findings"]]


class Handler(socketserver.StreamRequestHandler):
    """Answers one question, a line of JSON: `ask` says which `answer_…`, the rest are its arguments."""

    server: Listener

    def handle(self) -> None:
        self.connection.settimeout(ANSWER_LIMIT)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        question = json.loads(self.rfile.readline(2**20))
        said = getattr(self, f"answer_{question.pop('ask')}")(**question)
        self.server.last_heard = time.monotonic()
        self.wfile.write(json.dumps(said, default=vars).encode() + b"\n")

    def answer_greeting(self, index: int) -> tuple[int, Fields]:
        if index in range(self.server.size):
            self.server.heard.add(index)
            self.server.addresses.setdefault(index, self.client_address[0])
        return self.server.index, self.server.about

    def answer_link(self) -> None:
        """Answers each byte with the same, and then sends as much as the link takes."""
        while byte := self.rfile.read(1):
            self.wfile.write(byte)
        while True:
            self.connection.sendall(CHUNK)

    def answer_measure(self, there: str) -> Fields:
        return measure(there, self.server.port)

    def answer_end(self, errors: int) -> None:
        self.server.errors = errors
        self.server.ended.set()


class Listener(socketserver.ThreadingTCPServer):
    """What listens on this host, the one with that `index` of `size`; `about` is what it says of itself, `addresses`
    those of the hosts that are known."""

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

    def __init__(
        self, index: int, size: int, address: str, port: int, about: Fields, addresses: Mapping[int, str]
    ) -> None:
        self.address_family = family_of(address)
        super().__init__((address, port), Handler)
        self.index, self.leader, self.size, self.about, self.addresses = index, index, size, about, {**addresses}
        self.port = int(self.server_address[1])
        self.heard: set[int] = set()
        """The hosts that have greeted this one."""
        self.last_heard = time.monotonic()
        self.ended, self.errors = threading.Event(), 0
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever has asked what is no question, or has left, gets no answer."""

    def ask(self, host: int, question: str, limit: float = ANSWER_LIMIT, **arguments: object) -> Any:
        """The answer of a host. Raises `OSError` or `ValueError` if there is none."""
        with connect(self.addresses[host], self.port, question, limit, **arguments) as connection:
            return json.loads(connection.makefile().readline())


def listen(hosts: Sequence[str], size: int, port: int, env: RankEnv | None, findings: Sequence[Finding]) -> Listener:
    """The listener of this host, which has these `findings`. Known are the addresses of all `hosts`, or, without them,
    that of the first host of the world that `env` is of. This host is the first of `hosts` whose address it can listen
    at. Raises `UsageError` if there is none."""
    versions = {"torch": version_of("torch"), "playground": version_of("playground")}
    versions["python"] = platform.python_version()
    about = {"name": platform.node(), "versions": versions, "findings": findings}
    if env and not hosts:
        index = int(os.environ.get("GROUP_RANK", env.rank // env.local_size))
        return Listener(index, size, "", port, about, {0: env.rendezvous.host})
    addresses, taken = [([*resolve(name), ""])[0] for name in hosts], ""
    for index, address in enumerate(addresses):
        misleads = is_loopback(address) and not all(map(is_loopback, addresses))
        try:
            if address:
                return Listener(index, size, "" if misleads else address, port, about, dict(enumerate(hosts)))
        except OSError as failure:
            taken = taken or hosts[index] * (failure.errno == errno.EADDRINUSE)
    if taken:
        raise UsageError(f"port {port} of {taken} is taken: choose another with --port, the same on all hosts")
    raise UsageError(f"--hosts {','.join(hosts)}: none of them is this machine; name it as the others reach it")


def connect(address: str, port: int, question: str, limit: float, **arguments: object) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(json.dumps({"ask": question} | arguments).encode() + b"\n")
    return connection


def describe(failure: Exception) -> str:
    return getattr(failure, "strerror", None) or str(failure) or "no answer"


def measure(address: str, port: int) -> Fields:
    """Measure the link between here and that host: the bandwidth is that of the way here."""
    latency, bandwidth, problem = math.inf, math.nan, ""
    try:
        with connect(address, port, "link", LATENCY_LIMIT) as connection:
            for _ in range(PINGS):
                started = time.perf_counter()
                connection.sendall(b".")
                if not connection.recv(1):
                    raise ConnectionError("it has closed the connection")
                latency = min(latency, time.perf_counter() - started)
            connection.shutdown(socket.SHUT_WR)
            problem = STUCK
            bandwidth, problem = receive(connection), ""
    except OSError as failure:
        problem = problem or describe(failure)
    return {"latency": latency, "bandwidth": bandwidth, "problem": problem}


def receive(connection: socket.socket) -> float:
    """Take what comes, for a while: bytes per second. Raises `OSError` if nothing does."""
    connection.settimeout(TRANSFER_LIMIT)
    buffer = bytearray(len(CHUNK))
    if not connection.recv_into(buffer):
        raise ConnectionError
    nbytes, started = 1, time.perf_counter()
    with contextlib.suppress(TimeoutError):
        while time.perf_counter() < started + TRANSFER_SECONDS:
            nbytes += connection.recv_into(buffer)
    return nbytes / (time.perf_counter() - started)


def meet(listener: Listener, timeout: float) -> tuple[dict[int, Fields], dict[int, str]] | None:
    """Greet the hosts whose addresses are known until all have come or the time is up. None if one of those
    before this one is there: it leads. Otherwise this host does: what each host says of itself, and why some do not."""
    end, about, failures = time.monotonic() + timeout, {listener.index: listener.about}, dict[int, str]()

    def greet(index: int) -> None:
        try:
            there, said = listener.ask(index, "greeting", GREETING_LIMIT, index=listener.index)
            if there != index:
                raise ValueError(f"it is number {there} of its own list")
            about[index] = said | {"findings": [Finding(**each) for each in said["findings"]]}
        except (OSError, ValueError, TypeError) as failure:
            failures[index] = "it greets, but takes no connection: " * (index in listener.heard) + describe(failure)

    with ThreadPoolExecutor(listener.size) as pool:
        while True:
            list(pool.map(greet, listener.addresses.keys() - about))
            known = {*about} | listener.heard
            listener.leader = min(known)
            if listener.leader < listener.index:
                return None
            if len(known) == listener.size or time.monotonic() > end:
                break
            time.sleep(GREETING_INTERVAL)
        list(pool.map(greet, listener.heard - about.keys()))
    return about, {index: failures.get(index, "it has not come") for index in {*range(listener.size)} - about.keys()}


def follow(listener: Listener, timeout: float) -> int:
    """Answer what the host that leads asks, until it says how many errors there are. Raises `PlaygroundError` if it
    ends or falls silent without having done so."""
    while not listener.ended.wait(FOLLOW_INTERVAL):
        has_left = time.monotonic() > listener.last_heard + timeout + SILENCE
        try:
            listener.ask(listener.leader, "greeting", index=listener.index)
        except (OSError, ValueError) as failure:
            has_left |= isinstance(failure, ConnectionRefusedError)
        if has_left and not listener.ended.is_set():
            raise PlaygroundError("the host that leads has not told the result: does it reach this one?")
    return listener.errors


def schedule_rounds(hosts: Sequence[int]) -> Iterator[list[Pair]]:
    """All pairs, in rounds in which each host has one partner at most: the circle method."""
    circle = [*hosts, *[-1] * (len(hosts) % 2)]
    for _ in circle[1:]:
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        circle.insert(1, circle.pop())


def lead(
    listener: Listener, about: Mapping[int, Fields], silent: Mapping[int, str], listed: Sequence[str]
) -> HostsFacts:
    """Have each pair of the hosts that are there measure its link; those that seem broken once more, and those that
    seem slow, alone. Hosts that are not `listed` go by their own names."""
    names = listed or [about[index]["name"] if index in about else f"host {index}" for index in range(listener.size)]
    links: dict[Pair, Fields] = {}

    def measure_both_ways(pair: Pair) -> None:
        for here, there in (pair, pair[::-1]):
            try:
                if here == listener.index:
                    link = measure(listener.addresses[there], listener.port)
                else:
                    link = listener.ask(here, "measure", there=listener.addresses[there])
            except (OSError, ValueError) as failure:
                link = {"latency": math.nan, "bandwidth": math.nan, "problem": describe(failure)}
            before = links.get((here, there), link)
            if not before["problem"] and not link["problem"]:
                link["latency"] = min(before["latency"], link["latency"])
                link["bandwidth"] = max(before["bandwidth"], link["bandwidth"])
            links[here, there] = before if link["problem"] else link

    found = HostsFacts(names=names, leader=listener.index, about=about, silent=silent, links=links)
    with ThreadPoolExecutor(len(names)) as pool:
        for pairs in schedule_rounds(sorted(about)):
            list(pool.map(measure_both_ways, pairs))
        list(pool.map(measure_both_ways, {(min(pair), max(pair)) for pair, link in links.items() if link["problem"]}))
    for _ in range(REPEATS):
        slow = [who for which in LIMITS for who in blame(found, which)]
        for pair in [(a, b) for a, b in links if a < b and any({*who} <= {a, b} for who in slow)]:
            measure_both_ways(pair)
    return found


def dismiss(listener: Listener, found: HostsFacts, errors: int) -> None:
    """Tell all hosts that it is over, and how many errors there are."""
    for index in found.about.keys() - {listener.index}:
        with contextlib.suppress(OSError, ValueError):
            listener.ask(index, "end", errors=errors)


def explain(slowness: Mapping[Pair, float]) -> tuple[dict[int, float], dict[Pair, float]]:
    """How many times slower than the usual host each host is, and how many times slower each link is than its hosts
    explain. A host is as slow as its median link: one slow link does not make it slow."""
    hosts = {host for pair in slowness for host in pair}
    medians = {host: statistics.median_low(slowness[pair] for pair in slowness if host in pair) for host in hosts}
    usual = statistics.median_low(medians.values()) if medians else 1.0
    factors = {host: median / usual for host, median in medians.items()}
    return factors, {(a, b): value / max(medians[a], medians[b]) for (a, b), value in slowness.items()}


def blame(found: HostsFacts, which: str) -> dict[tuple[int, ...], float]:
    """The hosts and links that are slower than others by more than the limit, and how many times. Slowness is the
    seconds that a link takes for a byte, alone ("latency") or among many ("bandwidth"), in its slower direction."""
    values = {pair: link[which] for pair, link in found.links.items() if not link["problem"]}
    taken = {pair: value if which == "latency" else 1 / value for pair, value in values.items()}
    if which == "latency":
        least = min(taken.values(), default=0.0)
        taken = {pair: value if value > least + LEAST_EXCESS else least for pair, value in taken.items()}
    hosts, links = explain({(a, b): max(taken[a, b], taken[b, a]) for a, b in taken if a < b and (b, a) in taken})
    factors: dict[tuple[int, ...], float] = {(host,): factor for host, factor in hosts.items()}
    factors.update((pair, factor) for pair, factor in links.items())
    return {who: factor for who, factor in factors.items() if factor > LIMITS[which]}


def check_answers(found: HostsFacts) -> Iterator[Finding]:
    for index, why in sorted(found.silent.items()):
        rule = "all hosts run this command at the same time, with the same list of hosts"
        fix = "start it there; have its firewall accept TCP from the others"
        yield error(f"{found.names[index]} does not answer: {why}", rule, fix)


def check_host_versions(found: HostsFacts) -> Iterator[Finding]:
    for package in ("torch", "python", "playground"):
        versions = {
            found.names[index]: about["versions"].get(package) or "none" for index, about in found.about.items()
        }
        usual = statistics.mode(versions.values())
        if others := [f"{version} on {name}" for name, version in versions.items() if version != usual]:
            saw = f"{package} {usual}, but {', '.join(others)}"
            yield warning(saw, "all ranks run the same software", f"install {package} {usual} there")


def find_broken(found: HostsFacts, stuck: bool) -> Iterator[tuple[str, str]]:
    """The links with a problem, by the names of their hosts, and the problem; once if it is in both directions."""
    broken = {pair: link["problem"] for pair, link in found.links.items() if link["problem"]}
    for (here, there), problem in broken.items():
        both = (there, here) in broken
        if (problem == STUCK) is stuck and not (both and here > there):
            words = "between {} and {}" if both else "from {1} to {0}" if stuck else "from {0} to {1}"
            yield words.format(found.names[here], found.names[there]), problem


def check_connections(found: HostsFacts) -> Iterator[Finding]:
    for where, problem in find_broken(found, stuck=False):
        fix = "have the firewalls accept TCP between all hosts; compare routes"
        yield error(f"no connection {where}: {problem}", "every rank connects to every other", fix)


def check_large_packets(found: HostsFacts) -> Iterator[Finding]:
    for where, _ in find_broken(found, stuck=True):
        rule = "what is on the way takes packets as large as the hosts' MTU"
        fix = "ip link set NAME mtu 1400, and less until it passes; or correct the switch or tunnel"
        yield error(f"{where} small packets arrive and large ones do not", rule, fix)


def check_bandwidth(found: HostsFacts) -> Iterator[Finding]:
    for who, factor in blame(found, "bandwidth").items():
        rule = "an all-reduce is as fast as its slowest link"
        fix = "ethtool NAME shows speed and duplex; try another cable, port or switch; leave the host out"
        yield warning(f"{found.name(*who)} has a bandwidth {factor:.1f} times lower than the others", rule, fix)


def check_latency(found: HostsFacts) -> Iterator[Finding]:
    for who, factor in blame(found, "latency").items():
        saw = f"{found.name(*who)} has a latency {factor:.1f} times higher than the others"
        fix = "look at the route (traceroute), and at what else the hosts do"
        yield warning(saw, "a ring of n ranks waits 2 (n - 1) times for a message", fix)


CHECKS = find_checks(globals())


def summarize(found: HostsFacts) -> str:
    """The hosts and links, in a few words."""
    text = f"{len(found.about)} of {len(found.names)} hosts answer"
    if good := [link for link in found.links.values() if not link["problem"]]:
        rates, delays = [8e-9 * link["bandwidth"] for link in good], [1e6 * link["latency"] for link in good]
        text += f", {min(rates):.3g} to {max(rates):.3g} Gbit/s"
        text += f", {min(delays):.3g} to {max(delays):.3g} us there and back"
    return text
