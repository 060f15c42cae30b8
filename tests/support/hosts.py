"""Several hosts on one machine: network namespaces, each with a cable to one switch, an address and
a name of its own.

Each runs programs as a machine would that has been started by itself, except that all see the same
files and process numbers. Cables may be slow, and may be cut: then nothing comes through, not even
that a connection has ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PREFIX = "playground"
BURST = ("burst", "6kb", "latency", "10ms")
SEGMENTS = 2
"""Packets that a slow cable takes at once; it lets little more pass without delay. With more, what
is small would travel in no time, and answers would wait behind long queues."""
RUN_AS = 'hostname "$0" && exec "$@"'
AGENTS = (
    "last_call_timeout=1",
    "keep_alive_interval=1",
    "keep_alive_max_attempt=3",
    "join_timeout=120",
)
"""For torchrun's agents: how soon a host that is gone is given up, and a round begins with fewer
than could come."""


class Host:
    """One host of a network."""

    def __init__(self, network: Network, number: int) -> None:
        self.network = network
        self.number = number
        self.name = f"host-{'abcdefgh'[number]}"
        self.address = f"10.77.0.{number + 1}"
        self.namespace = f"{network.prefix}-{number}"
        self.started: list[subprocess.Popen[str]] = []

    def connect(self, rate: str | None) -> None:
        """Lay the cable to the switch."""
        port = ("netns", self.network.switch)
        ip("netns", "add", self.namespace)
        ip(
            "-n",
            self.namespace,
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            self.port,
            *port,
        )
        ip("-n", self.network.switch, "link", "set", self.port, "master", "bridge", "up")
        ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for name in ("lo", "eth0"):
            ip("-n", self.namespace, "link", "set", name, "up")
        if rate:
            self.limit(rate)

    def limit(self, rate: str, interface: str = "eth0") -> None:
        """Have a cable take no more than this, as tc spells it."""
        ip("-n", self.namespace, "link", "set", "dev", interface, "gso_max_segs", SEGMENTS)
        run(
            "tc",
            "-n",
            self.namespace,
            "qdisc",
            "replace",
            "dev",
            interface,
            "root",
            "tbf",
            "rate",
            rate,
            *BURST,
        )

    @property
    def port(self) -> str:
        return f"port{self.number}"

    def start(self, *words: object, **environ: str) -> subprocess.Popen[str]:
        """Start a program here, in a session of its own."""
        place = ("ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", "sh", "-c")
        program = subprocess.Popen(
            [*place, RUN_AS, self.name, *map(str, words)], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, **environ},
        )  # fmt: skip
        self.started.append(program)
        return program

    def run_torchrun(
        self, options: Sequence[object], *words: object, **environ: str
    ) -> subprocess.Popen[str]:
        """Start `torchrun options… -m playground words…` here."""
        agent = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            *options,
            "--local-addr",
            self.address,
        )
        return self.start(*agent, "-m", "playground", *words, **environ)

    def torchrun(self, ranks: int, *words: object, **environ: str) -> subprocess.Popen[str]:
        """Start `python -m playground words…` on so many ranks here, in a world of all hosts."""
        hosts = self.network.hosts
        place = ("--nnodes", len(hosts), "--node-rank", self.number, "--nproc-per-node", ranks)
        meeting = ("--master-addr", hosts[0].address, "--master-port", 29500)
        return self.run_torchrun([*place, *meeting], *words, **environ)

    def join_elastic(
        self, nodes: str, ranks: int, *words: object, **environ: str
    ) -> subprocess.Popen[str]:
        """Start `python -m playground words…` on so many ranks here, in a world of as many hosts as
        `nodes` says (2:2) that goes on when one is replaced. The first host serves the
        rendezvous."""
        endpoint = f"{self.network.hosts[0].address}:29400"
        agents = [*AGENTS, f"is_host={int(self.number == 0)}"]
        place = (
            "--nnodes",
            nodes,
            "--nproc-per-node",
            ranks,
            "--max-restarts",
            5,
            "--rdzv-id",
            "test",
        )
        meeting = (
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            endpoint,
            "--rdzv-conf",
            ",".join(agents),
        )
        return self.run_torchrun(
            [*place, *meeting], *words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **environ
        )

    def kill(self) -> None:
        """Kill every process here at once."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        """Pull the cable."""
        ip("-n", self.network.switch, "link", "set", self.port, "down")

    def processes(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]

    def remove(self) -> None:
        """End all that runs here, and the host."""
        end_namespace(self.namespace)
        for program in self.started:
            program.communicate()


class Network:
    """So many hosts at one switch; `rate`, as tc spells it (100mbit), is what each sends at
    most."""

    made = 0

    def __init__(self, size: int, rate: str | None = None) -> None:
        remove_forgotten()
        Network.made += 1
        self.prefix = f"{PREFIX}-{os.getpid()}-{Network.made}"
        self.switch = f"{self.prefix}-switch"
        self.hosts = [Host(self, number) for number in range(size)]
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.switch, "link", "set", "bridge", "up")
            for host in self.hosts:
                host.connect(rate)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        for host in self.hosts:
            host.remove()
        end_namespace(self.switch)


def make_network(size: int, rate: str | None = None) -> Network:
    """A network; the test is skipped where there can be none."""
    if missing := [
        program for program in ("ip", "tc", "unshare", "hostname") if not shutil.which(program)
    ]:
        pytest.skip(f"hosts need {', '.join(missing)}: install iproute2")
    if os.geteuid() != 0:
        pytest.skip("hosts are network namespaces: only root may make them")
    try:
        return Network(size, rate)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")


def ip(*words: object) -> str:
    return run("ip", *words)


def run(*words: object) -> str:
    return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout


def end_namespace(name: str) -> None:
    """Kill every process in a namespace, and remove it, if it is there."""
    with contextlib.suppress(subprocess.CalledProcessError):
        for pid in ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        ip("netns", "delete", name)


def remove_forgotten() -> None:
    """Remove what a test run that was killed has left."""
    for line in ip("netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{PREFIX}-") and not Path(f"/proc/{name.split('-')[1]}").exists():
            end_namespace(name)
