"""The first tier: this machine, examined without torch.

`MachineFacts()` holds the facts; a check is a function from the facts to faults.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fcntl import ioctl

from playground.tools.doctor.checks import Fault, error, warning
from playground.ui.units import format_bytes
from playground.world.backends import BACKENDS
from playground.world.rendezvous.rendezvous import LOOPBACK_INTERFACE, is_loopback

GET_FLAGS, IS_UP = 0x8913, 1
"""A request of ioctl, SIOCGIFFLAGS; and IFF_UP. Source: netdevice(7)"""
TENSOR = 2**24
"""Bytes that are tried to be put into /dev/shm."""
VARIABLE = BACKENDS["gloo"].interface_variable


def resolve(name: str) -> list[str]:
    """The addresses of a name, each once; empty if it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [*dict.fromkeys(str(address[0]) for *_, address in found)]


def find_interfaces() -> list[str]:
    """The network interfaces that are up."""
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        flags = [ioctl(probe, GET_FLAGS, name.encode().ljust(40, b"\0")) for name in names]
    return [
        name
        for name, found in zip(names, flags, strict=True)
        if struct.unpack_from("H", found, 16)[0] & IS_UP
    ]


def try_shared_memory() -> tuple[int, str]:
    try:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.posix_fallocate(file.fileno(), 0, TENSOR)
    except OSError as failure:
        return 0, failure.strerror or str(failure)
    return shutil.disk_usage("/dev/shm").total, ""


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The facts of this machine."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    several_hosts: bool = False
    """Whether it is to train together with others."""
    hostname: str = field(default_factory=socket.gethostname)
    resolved: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {
            name: resolve(name) for name in (socket.gethostname(), "localhost")
        }
    )
    """Addresses of names: this host's, localhost."""
    interfaces: Sequence[str] = field(default_factory=find_interfaces)
    """Those that are up."""
    shared_memory: tuple[int, str] = field(default_factory=try_shared_memory)
    """Bytes of /dev/shm, and why a tensor cannot be put there."""

    @property
    def outer(self) -> str:
        """An interface to other hosts."""
        return next((name for name in self.interfaces if name != LOOPBACK_INTERFACE), "INTERFACE")


def check_host_name(machine: MachineFacts) -> Iterator[Fault]:
    addresses = machine.resolved[machine.hostname]
    if machine.environ.get(VARIABLE) or not all(map(is_loopback, addresses)):
        return
    what = f"to {addresses[0]}, which no other host can reach" if addresses else "to nothing"
    rule = "unless told otherwise, gloo listens at the address that the host's name resolves to"
    fix = f"correct /etc/hosts, or export {VARIABLE}={machine.outer}"
    find = error if machine.several_hosts else warning
    yield find(f"the name {machine.hostname} resolves {what}", rule, fix)


def check_loopback(machine: MachineFacts) -> Iterator[Fault]:
    rule = "ranks of one host meet on loopback"
    fix = f"ip link set {LOOPBACK_INTERFACE} up; correct /etc/hosts"
    if LOOPBACK_INTERFACE not in machine.interfaces:
        yield error(f"the loopback interface {LOOPBACK_INTERFACE} is down", rule, fix)
    if not any(map(is_loopback, machine.resolved["localhost"])):
        found = ", ".join(machine.resolved["localhost"]) or "nothing"
        yield error(f"localhost resolves to {found}", rule, fix)


def check_interface_variables(machine: MachineFacts) -> Iterator[Fault]:
    given = machine.environ.get(VARIABLE, "")
    if given and not {*given.split(",")} <= {*machine.interfaces}:
        up = ", ".join(machine.interfaces)
        saw = f"{VARIABLE}={given}, and the interfaces that are up are {up}"
        fix = f"export {VARIABLE}={machine.outer}, or unset {VARIABLE}"
        yield error(saw, "it names interfaces that are up", fix)


def check_shared_memory(machine: MachineFacts) -> Iterator[Fault]:
    size, refusal = machine.shared_memory
    rule = "NCCL and DataLoader's workers pass tensors through /dev/shm: 1 GiB at least"
    fix = (
        "start the container with --shm-size=8g or --ipc=host; else mount -o remount,size=8G "
        "/dev/shm"
    )
    if refusal:
        yield error(f"{format_bytes(TENSOR)} cannot be put into /dev/shm: {refusal}", rule, fix)
    elif size < 2**30:
        yield warning(f"/dev/shm has {format_bytes(size)}", rule, fix)


CHECKS = (check_host_name, check_loopback, check_interface_variables, check_shared_memory)
