"""The first tier: this machine, examined in less than a second and without torch.

`MachineFacts()` holds the facts; a check is a function from the facts to findings. What the system does not tell is
None or empty, and passes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fcntl import ioctl
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TypeVar

from playground.measurement import format_bytes
from playground.runtime.backends import BACKENDS
from playground.runtime.meeting.rendezvous import GET_ADDRESS, LOOPBACK_INTERFACE, is_loopback
from playground.tools.doctor import Finding, error, find_checks, warning

T = TypeVar("T")

GET_FLAGS, IS_UP = 0x8913, 1
"""A request of ioctl, SIOCGIFFLAGS; and IFF_UP. Source: netdevice(7)"""
NETWORK_LIMIT = 5.0
"""Seconds in which names must be resolved."""
TENSOR = 2**24
"""Bytes that are tried to be put into /dev/shm."""
DEFAULT_PORT = 29500
"""The default of torchrun and of most tutorials."""
ESSENTIAL, SHADOWABLE = {"torch", "torchvision", "numpy"}, sys.stdlib_module_names - {"test"}
"""Modules without which nothing runs, and those of Python's own."""
VARIABLES = {backend.interface_variable: backend for backend in BACKENDS.values()}
"""The variable by which a backend is told its interface. (Those that share one are alike.)"""


def call_within_limit(call: Callable[[], T]) -> T | None:
    """The result of a call, which runs in a thread; None if it takes longer than `NETWORK_LIMIT`."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(NETWORK_LIMIT)
    return results[0] if results else None


def resolve(name: str) -> list[str]:
    """The addresses of a name, each once; empty if it has none."""
    try:
        return [*dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))]
    except OSError:
        return []


def resolve_names() -> dict[str, list[str] | None]:
    return {name: call_within_limit(partial(resolve, name)) for name in (socket.gethostname(), "localhost")}


def find_interfaces() -> dict[str, str]:
    """The address of each network interface that is up and has one."""
    if sys.platform != "linux":
        return {}
    sixes = {line.split()[-1]: bytes.fromhex(line.split()[0]) for line in read(Path("/proc/net/if_inet6")).splitlines()}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode().ljust(40, b"\0")
            with contextlib.suppress(OSError):  # gone by now
                if struct.unpack_from("H", ioctl(probe, GET_FLAGS, request), 16)[0] & IS_UP:
                    if name in sixes:
                        found[name] = socket.inet_ntop(socket.AF_INET6, sixes[name])
                    found[name] = socket.inet_ntoa(ioctl(probe, GET_ADDRESS, request)[20:24])
    return found


def try_port() -> str:
    """Why this host cannot serve the store at MASTER_PORT; empty if it can, or is not MASTER_ADDR."""
    host, port = os.environ.get("MASTER_ADDR") or "localhost", os.environ.get("MASTER_PORT", DEFAULT_PORT)
    try:
        socket.create_server((host, int(port))).close()
    except (OSError, ValueError, OverflowError) as failure:
        is_elsewhere = isinstance(failure, socket.gaierror) or getattr(failure, "errno", 0) == errno.EADDRNOTAVAIL
        return "" if is_elsewhere else getattr(failure, "strerror", None) or str(failure)
    return ""


def try_shared_memory() -> tuple[int, str]:
    if sys.platform != "linux":
        return 0, ""
    try:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.posix_fallocate(file.fileno(), 0, TENSOR)
    except OSError as failure:
        return 0, failure.strerror or str(failure)
    return shutil.disk_usage("/dev/shm").total, ""


def read(path: Path) -> str:
    """The text of a file of the system; empty if there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def find_shadows() -> list[tuple[str, str]]:
    """(module, file) in the working folder and in those of PYTHONPATH, of modules that torch imports. Where a package
    has been installed its metadata lies beside it."""
    folders = [os.path.abspath(each) for each in ("", *os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    specs = (PathFinder.find_spec(name, folders) for name in sorted(ESSENTIAL | SHADOWABLE))
    found = ((spec.name, Path(spec.origin)) for spec in specs if spec and spec.origin)
    files = ((name, file.parent if file.stem == "__init__" else file) for name, file in found)
    return [(name, str(file)) for name, file in files if not [*file.parent.glob(f"{name}-*.dist-info")]]


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The facts of this machine."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    several_hosts: bool = False
    """Whether it is to train together with others."""
    hostname: str = field(default_factory=socket.gethostname)
    resolved: Mapping[str, Sequence[str] | None] = field(default_factory=resolve_names)
    """Addresses of names: this host's, localhost. None if there was no answer in time."""
    interfaces: Mapping[str, str] = field(default_factory=find_interfaces)
    """The address of each interface that is up and has one; empty where a system does not tell."""
    port_refusal: str = field(default_factory=lambda: call_within_limit(try_port) or "")
    shared_memory: tuple[int, str] = field(default_factory=try_shared_memory)
    """Bytes of /dev/shm, and why a tensor cannot be put there; none and nothing where a system has others."""
    shadows: Sequence[tuple[str, str]] = field(default_factory=find_shadows)


def check_import_path(machine: MachineFacts) -> Iterator[Finding]:
    for module, file in machine.shadows:
        kind = error if module in ESSENTIAL else warning
        saw = f"{file} would be imported in the place of {module}"
        yield kind(saw, "Python looks in a script's folder and in PYTHONPATH first", f"rename {file}")


def check_host_name(machine: MachineFacts) -> Iterator[Finding]:
    name, chosen = machine.hostname, any(map(machine.environ.get, VARIABLES))
    addresses = machine.resolved.get(name, ["10.0.0.1"])
    kind = error if machine.several_hosts and addresses is not None else warning
    others = [each for each in machine.interfaces if each != LOOPBACK_INTERFACE]
    fix = f"correct /etc/hosts, or export GLOO_SOCKET_IFNAME={others[0] if others else 'INTERFACE'}"
    rule = "unless told otherwise, gloo listens at the address that the host's name resolves to"
    if addresses is None:
        yield kind(f"the name {name} does not resolve within {NETWORK_LIMIT:g} s", rule, fix)
    elif not addresses and not chosen:
        yield kind(f"the name {name} resolves to nothing", rule, fix)
    elif addresses and all(map(is_loopback, addresses)) and others and not chosen:
        saw = f"the name {name} resolves to {addresses[0]}, which no other host can reach"
        yield kind(saw, rule, fix)


def check_loopback(machine: MachineFacts) -> Iterator[Finding]:
    rule, fix = "ranks of one host meet on loopback", f"ip link set {LOOPBACK_INTERFACE} up; correct /etc/hosts"
    if sys.platform == "linux" and LOOPBACK_INTERFACE not in machine.interfaces:
        yield error(f"the loopback interface {LOOPBACK_INTERFACE} is down or has no address", rule, fix)
    local = machine.resolved.get("localhost")
    if local is not None and not any(map(is_loopback, local)):
        yield error(f"localhost resolves to {', '.join(local or ['nothing'])}", rule, fix)


def match_interfaces(value: str, names: Iterable[str], exact: bool) -> list[str]:
    """The interfaces that a value of such a variable stands for. NCCL's has prefixes of names, with = before it exact
    names, with ^ those that are not to be used. Source:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname"""
    excludes, exact = value.startswith("^"), exact or "=" in value[:2]
    given = value.lstrip("^=").split(",")
    return [each for each in names if (each in given if exact else each.startswith(tuple(given))) is not excludes]


def check_interface_variables(machine: MachineFacts) -> Iterator[Finding]:
    outer = [*[each for each in machine.interfaces if each != LOOPBACK_INTERFACE], "INTERFACE"][0]
    for variable, backend in VARIABLES.items():
        value, exact = machine.environ.get(variable, ""), backend.trusts_host_name
        if value and machine.interfaces:
            found = match_interfaces(value, machine.interfaces, exact)
            rule, fix = "it names interfaces that are up and have an address", f"export {variable}={outer}, or unset it"
            if not found or (exact and len(found) < len(value.split(","))):
                saw = f"{variable}={value}, and what is up and has an address is {', '.join(machine.interfaces)}"
                yield (error if exact else warning)(saw, rule, fix)  # whether NCCL is used is not known
            elif machine.several_hosts and found == [LOOPBACK_INTERFACE]:
                yield error(f"{variable}={value} in a world of several hosts", "no other host can reach loopback", fix)


def check_master_port(machine: MachineFacts) -> Iterator[Finding]:
    port = machine.environ.get("MASTER_PORT", "")
    fix = f"take another port; ss -ltnp 'sport = :{port or DEFAULT_PORT}' tells who has it"
    if machine.port_refusal:
        default = "" if port else ", torchrun's default"
        saw = f"nothing can listen at port {port or DEFAULT_PORT}{default}: {machine.port_refusal}"
        yield (error if port else warning)(saw, "rank 0 listens at MASTER_PORT, which must be free", fix)


def check_shared_memory(machine: MachineFacts) -> Iterator[Finding]:
    size, refusal = machine.shared_memory
    rule = "NCCL and DataLoader's workers pass tensors through /dev/shm: 1 GiB at least"
    fix = "start the container with --shm-size=8g or --ipc=host; else mount -o remount,size=8G /dev/shm"
    if refusal:
        yield error(f"{format_bytes(TENSOR)} cannot be put into /dev/shm: {refusal}", rule, fix)
    elif 0 < size < 2**30:
        yield warning(f"/dev/shm has {format_bytes(size)}", rule, fix)


CHECKS = find_checks(globals())
