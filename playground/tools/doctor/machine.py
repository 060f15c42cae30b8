"""The first tier: this machine, examined in less than a second and without torch.

`MachineFacts()` holds the facts; a check is a function from the facts to findings. What the system does not tell is
None or empty, and passes.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fcntl import ioctl
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TypeVar

from playground.measurement import format_bytes
from playground.measurement.environment import memory as read_memory
from playground.runtime.backends import BACKENDS
from playground.runtime.host import cores as usable_cores
from playground.runtime.meeting.environment import SERVED_BY_TORCHRUN
from playground.runtime.meeting.rendezvous import GET_ADDRESS, LOOPBACK_INTERFACE, is_loopback
from playground.tools.doctor import Finding, error, find_checks, warning

T = TypeVar("T")

GET_FLAGS, IS_UP = 0x8913, 1
"""A request of ioctl, SIOCGIFFLAGS; and IFF_UP. Source: netdevice(7)"""
NETWORK_LIMIT = 5.0
"""Seconds that names have to be resolved in, and connections of this machine to itself to be made."""
TENSOR = 2**24
"""Bytes that are tried to be put into /dev/shm."""
LIMITS = {"NOFILE": ("ulimit -n", "files and sockets"), "NPROC": ("ulimit -u", "threads")}
DEFAULT_PORT = 29500
"""That of torchrun and of most tutorials."""
ESSENTIAL, SHADOWABLE = {"torch", "torchvision", "numpy"}, sys.stdlib_module_names - {"test"}
"""Modules without which nothing runs, and those of Python's own."""
VARIABLES = {backend.interface_variable: backend for backend in BACKENDS.values()}
"""The variable by which a backend is told its interface. (Those that share one are alike.)"""


def run_together(calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """The results, by key, of the calls that return within `NETWORK_LIMIT`: each runs in a thread of its own."""
    results: dict[str, T] = {}

    def run(key: str, call: Callable[[], T]) -> None:
        results[key] = call()

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in calls.items()]
    end = time.monotonic() + NETWORK_LIMIT
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(results)


def resolve(name: str) -> list[str]:
    """The addresses of a name, each once; empty if it has none."""
    try:
        return [*dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))]
    except OSError:
        return []


def resolve_names() -> dict[str, list[str] | None]:
    names = {socket.gethostname(), "localhost", os.environ.get("MASTER_ADDR") or "localhost"}
    answers = run_together({name: partial(resolve, name) for name in names})
    return {name: answers.get(name) for name in names}


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


def find_unreachable() -> dict[str, str]:
    tried = {name: address for name, address in find_interfaces().items() if not address.startswith("fe80:")}
    answers = run_together({name: partial(connect_to_itself, address) for name, address in tried.items()})
    return {name: why for name in tried if (why := answers.get(name, "no answer"))}


def connect_to_itself(address: str) -> str:
    """Why a connection to this address of ours, at a port that listens, is not made; empty if it is."""
    try:
        with socket.create_server((address, 0), family=family_of(address)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=NETWORK_LIMIT).close()
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def try_port() -> str:
    """Why this host cannot serve the store at MASTER_PORT; empty if it can, or is not to."""
    if os.environ.get(SERVED_BY_TORCHRUN) == "True" or os.environ.get("RANK", "0") != "0":
        return ""
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


def read_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (and v1, whose files have other names)"""
    v1 = (read(root / f"cpu/cpu.cfs_{which}_us") for which in ("quota", "period"))
    quota, period = read(root / "cpu.max").split() or v1
    return int(quota) / int(period) if quota.isdigit() else math.inf


def find_temporary() -> tuple[str, int]:
    try:
        return (folder := tempfile.gettempdir()), shutil.disk_usage(folder).free
    except FileNotFoundError:
        return "", 0


def find_shadows() -> list[tuple[str, str]]:
    """(module, file) in the working folder and in those of PYTHONPATH, of modules that torch imports. Where a package
    has been installed its metadata lies beside it."""
    folders = [os.path.abspath(each) for each in ("", *os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    specs = (PathFinder.find_spec(name, folders) for name in sorted(ESSENTIAL | SHADOWABLE))
    found = ((spec.name, Path(spec.origin)) for spec in specs if spec and spec.origin)
    files = ((name, file.parent if file.stem == "__init__" else file) for name, file in found)
    return [(name, str(file)) for name, file in files if not [*file.parent.glob(f"{name}-*.dist-info")]]


def spans_hosts() -> bool:
    """Whether the environment is that of a rank in a world of several hosts."""
    size, local = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return not is_loopback(os.environ.get("MASTER_ADDR", "localhost")) and size != local


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What is known of this machine."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    several_hosts: bool = field(default_factory=spans_hosts)
    """Whether it is to train together with others."""
    hostname: str = field(default_factory=socket.gethostname)
    resolved: Mapping[str, Sequence[str] | None] = field(default_factory=resolve_names)
    """Addresses of names: this host's, localhost, that of MASTER_ADDR. None if there was no answer in time."""
    interfaces: Mapping[str, str] = field(default_factory=find_interfaces)
    """The address of each interface that is up and has one; empty where a system does not tell."""
    unreachable: Mapping[str, str] = field(default_factory=find_unreachable)
    """Interfaces at whose address this machine does not reach itself, and why."""
    port_refusal: str = field(default_factory=lambda: run_together({"port": try_port}).get("port", ""))
    shared_memory: tuple[int, str] = field(default_factory=try_shared_memory)
    """Bytes of /dev/shm, and why a tensor cannot be put there; none and nothing where a system has others."""
    limits: Mapping[str, int] = field(
        default_factory=lambda: {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in LIMITS}
    )
    """Soft limits by name, -1 for none."""
    available_memory: int = field(default_factory=lambda: read_memory("MemAvailable"))
    cores: int = field(default_factory=usable_cores)
    quota: float = field(default_factory=read_quota)
    """Cores whose time this process's container may use."""
    temporary: tuple[str, int] = field(default_factory=find_temporary)
    """The folder for temporary files, and the bytes that are free there."""
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


def check_firewall(machine: MachineFacts) -> Iterator[Finding]:
    for name, why in machine.unreachable.items():
        is_used = machine.several_hosts or machine.interfaces[name] in (machine.resolved.get(machine.hostname) or ())
        saw = f"a connection to this machine's own address on {name} fails: {why}"
        rule, fix = "ranks connect to each other at any port", "have the firewall accept TCP between hosts that train"
        yield (error if is_used else warning)(saw, rule, fix)


def check_master_address(machine: MachineFacts) -> Iterator[Finding]:
    name = machine.environ.get("MASTER_ADDR", "")
    if name and not (addresses := machine.resolved.get(name)):
        why = f"does not resolve within {NETWORK_LIMIT:g} s" if addresses is None else "resolves to nothing"
        fix = "export MASTER_ADDR with the IP address of the first host"
        kind = warning if addresses is None else error
        yield kind(f"MASTER_ADDR={name} {why}", "all ranks meet at MASTER_ADDR", fix)


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


def check_limits(machine: MachineFacts) -> Iterator[Finding]:
    for name, limit in machine.limits.items():
        if 0 <= limit < 1024:
            command, counted = LIMITS[name]
            rule = f"a rank has {counted} for every other rank, for workers and files: 1024 at least"
            yield warning(f"{command} is {limit}", rule, f"{command} 65536, or in /etc/security/limits.conf")


def check_memory(machine: MachineFacts) -> Iterator[Finding]:
    if (free := machine.available_memory) < 2**30:
        rule = "torch takes 0.3 GiB in each rank before there is a model"
        yield warning(f"{format_bytes(free)} of memory are available", rule, "end other programs, or take fewer ranks")


def check_cores(machine: MachineFacts) -> Iterator[Finding]:
    if machine.quota < machine.cores:
        saw = f"{machine.cores} cores are seen, and the container may use the time of {machine.quota:g}"
        rule = "threads beyond the quota are stopped, all at once, for most of every 0.1 s"
        fix = f"raise the quota, or taskset -c 0-{max(0, math.floor(machine.quota) - 1)}"
        yield warning(saw, rule, fix)


def check_threads(machine: MachineFacts) -> Iterator[Finding]:
    most = max(1, math.floor(min(machine.cores, machine.quota)))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = machine.environ.get(name, "1").split(",")[0]
        rule, fix = "each rank's threads, times the ranks, are no more than the cores", f"export {name}={most}, or less"
        if not value.isdigit() or not int(value):
            yield warning(f"{name}={value} is not a number of threads", rule, fix)
        elif int(value) > most:
            yield warning(f"{name}={value} on {most} core{'s' * (most > 1)}", rule, fix)


def check_disk(machine: MachineFacts) -> Iterator[Finding]:
    (folder, free), rule = machine.temporary, "torch, torchrun and compilers write files in TMPDIR: 1 GiB at least"
    if not folder:
        yield error("no folder for temporary files can be written", rule, "export TMPDIR with one that can be written")
    elif free < 2**30:
        saw = f"{format_bytes(free)} are free in {folder}"
        yield warning(saw, rule, "make room there, or export TMPDIR with another folder")


CHECKS = find_checks(globals())
