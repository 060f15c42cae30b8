"""The first tier: this machine, examined in less than a second and without torch.

`Machine()` holds the facts; a check is a function from the facts to findings. What the system does not tell is None or
empty, and passes.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any, TypeVar

from playground.measurement import format_bytes
from playground.measurement.environment import memory as read_memory
from playground.runtime.backends import BACKENDS
from playground.runtime.host import cores as usable_cores
from playground.runtime.meeting.environment import SERVED_BY_TORCHRUN
from playground.runtime.meeting.rendezvous import GET_ADDRESS, LOOPBACK_INTERFACE, is_loopback
from playground.tools.doctor import Finding, error, find_checks, warning

T = TypeVar("T")

GET_FLAGS, GET_MTU, IS_UP = 0x8913, 0x8921, 1
"""Requests of ioctl: SIOCGIFFLAGS, SIOCGIFMTU; and IFF_UP. Source: netdevice(7)"""
NETWORK_LIMIT = 0.7
"""Seconds that names have to be resolved in, and connections of this machine to itself to be made."""
LOOP, CORE_SECONDS = 10_000, 0.2
"""Turns of the loop that measures a core, some 0.2 ms and so much less than a time slice; and for how long to repeat
it."""
DEFAULT_PORT = 29500
"""That of torchrun and of most tutorials."""
ESSENTIAL, SHADOWABLE = {"torch", "torchvision", "numpy"}, sys.stdlib_module_names - {"test"}
"""Modules without which nothing runs, and those of Python's own."""
CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "xen", "arch_sys_counter", "riscv_clocksource")
"""Sources of time that are read without a system call."""
VARIABLES = {backend.interface_variable: backend for backend in BACKENDS.values()}
"""The variable by which a backend is told its interface. (Those that share one are alike.)"""
LIMITS = (("NOFILE", "ulimit -n", "files and sockets"), ("NPROC", "ulimit -u", "threads"))
LEAST = 1024


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface. `mtu` is its largest packet, in bytes; `address` empty if it has none."""

    name: str
    is_up: bool = True
    mtu: int = 1500
    address: str = ""

    @property
    def is_usable(self) -> bool:
        return self.is_up and bool(self.address)


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


def find_interfaces() -> list[Interface]:
    if sys.platform != "linux":
        return []
    from fcntl import ioctl

    sixes = {line.split()[-1]: line.split()[0] for line in read("/proc/net/if_inet6").splitlines()}
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:

        def ask(request: int, name: str) -> bytes:
            try:
                return ioctl(probe, request, name.encode().ljust(40, b"\0"))[16:24]
            except OSError:  # gone by now, or it has no address
                return bytes(8)

        for _, name in socket.if_nameindex():
            four = ask(GET_ADDRESS, name)[4:]
            six = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(sixes[name])) if name in sixes else ""
            address = socket.inet_ntoa(four) if any(four) else six
            flags, mtu = (
                struct.unpack_from("H", ask(GET_FLAGS, name))[0],
                struct.unpack_from("i", ask(GET_MTU, name))[0],
            )
            found.append(Interface(name=name, is_up=bool(flags & IS_UP), mtu=mtu, address=address))
    return found


def connect_to_itself(address: str) -> str:
    """Why a connection to this address of ours, at a port that listens, is not made; empty if it is."""
    try:
        with socket.create_server((address, 0), family=family_of(address)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=NETWORK_LIMIT).close()
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""


def find_unreachable() -> dict[str, str]:
    addresses = {each.name: each.address for each in find_interfaces() if each.is_usable}
    global_ones = {name: address for name, address in addresses.items() if not address.startswith("fe80:")}
    answers = run_together({name: partial(connect_to_itself, way) for name, way in global_ones.items()})
    return {name: why for name in global_ones if (why := answers.get(name, "no answer"))}


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_own(name: str) -> bool:
    """Whether a name or an address is this machine's."""
    with contextlib.suppress(OSError):
        for address in run_together({name: partial(resolve, name)}).get(name, []):
            with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))
                return True
    return False


def try_port() -> str:
    """Why this host cannot serve the store, at the port that the environment says; empty also if it is not to."""
    environ, served = os.environ, os.environ.get(SERVED_BY_TORCHRUN) == "True"
    if served or environ.get("RANK", "0") != "0" or not is_own(environ.get("MASTER_ADDR") or "localhost"):
        return ""
    try:
        socket.create_server(("", int(environ.get("MASTER_PORT", DEFAULT_PORT)))).close()
    except (OSError, ValueError, OverflowError) as failure:
        return getattr(failure, "strerror", None) or str(failure)
    return ""


def read(path: str) -> str:
    """The text of a file of the system; empty if there is none."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def read_swapped() -> int:
    found = dict(re.findall(r"^(Swap\w+):\s*(\d+) kB$", read("/proc/meminfo"), re.MULTILINE))
    return 1024 * (int(found.get("SwapTotal", 0)) - int(found.get("SwapFree", 0)))


def read_limits() -> dict[str, int]:
    if sys.platform == "win32":
        return {}
    import resource

    names = [name for name in ("NOFILE", "NPROC", "MEMLOCK") if hasattr(resource, f"RLIMIT_{name}")]
    return {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in names}


def read_quota(root: Path = Path("/sys/fs/cgroup"), groups: str = "/proc/self/cgroup") -> float:
    """Cores whose time this process may use, by its control group and those above. Source:
    https://docs.kernel.org/admin-guide/cgroup-v2.html (and v1, whose files have other names)"""
    found = re.search(r"^0::/(.*)$", read(groups), re.MULTILINE)
    own = root / (found[1] if found else "")
    pairs = [read(f"{folder}/cpu.max").split() for folder in (own, *own.parents) if folder.is_relative_to(root)]
    pairs.append([read(f"{root}/cpu/cpu.cfs_{which}_us") for which in ("quota", "period")])
    return min(
        (int(pair[0]) / int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0].isdigit()), default=math.inf
    )


def measure_cores() -> dict[int, float]:
    """Seconds that a short loop takes on each core, the shortest of many times; those that look slow are measured once
    more, for others may have been running there. Empty where the system does not let us choose a core."""
    if not hasattr(os, "sched_setaffinity"):
        return {}
    allowed, best = os.sched_getaffinity(0), dict[int, float]()
    try:
        for measured in (lambda: allowed, lambda: find_slow_cores(best)):
            end, rounds, chosen = time.perf_counter() + CORE_SECONDS, 0, sorted(measured())
            while chosen and (rounds < 5 or time.perf_counter() < end):
                rounds += 1
                for core in chosen:
                    os.sched_setaffinity(0, {core})
                    started = time.perf_counter()
                    for _ in range(LOOP):
                        pass
                    best[core] = min(best.get(core, math.inf), time.perf_counter() - started)
    except OSError:
        return {}
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, allowed)
    return best


def find_slow_cores(seconds: Mapping[int, float], ratio: float = 1.5) -> list[int]:
    """The cores that take longer than the median by more than this ratio."""
    return [core for core in seconds if seconds[core] > ratio * median_low(seconds.values())]


def find_governors() -> list[str]:
    policies = Path("/sys/devices/system/cpu/cpufreq").glob("policy*")
    return sorted({f"{read(f'{each}/scaling_governor')} of {read(f'{each}/scaling_driver')}" for each in policies})


def find_temporary() -> tuple[str, int]:
    """The folder for temporary files, and the bytes that are free there."""
    try:
        return (folder := tempfile.gettempdir()), shutil.disk_usage(folder).free
    except FileNotFoundError:
        return "", 0


def read_shared_memory() -> int | None:
    """Bytes of /dev/shm, 0 if there is none; None where a system has others."""
    if sys.platform != "linux":
        return None
    return shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0


def python_path() -> list[Path]:
    return [Path(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def find_shadows() -> list[tuple[str, str]]:
    """(module, file) in the working folder and in those of PYTHONPATH, if torch imports a module of that name."""
    files = [file for folder in (Path(), *python_path()) for file in sorted(folder.glob("*.py"))]
    files += [file.parent for file in Path().glob("*/__init__.py")]  # elsewhere it may be torch itself
    return [(file.stem, str(file.absolute())) for file in files if file.stem in ESSENTIAL | SHADOWABLE]


def spans_hosts() -> bool:
    """Whether the environment is that of a rank in a world of several hosts."""
    size, local = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return not is_loopback(os.environ.get("MASTER_ADDR", "localhost")) and size != local


def fact(read: Callable[[], Any]) -> Any:
    return field(default_factory=read)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is known of this machine."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    several_hosts: bool = fact(spans_hosts)
    """Whether it is to train together with others."""
    python: str = fact(lambda: sys.version.split()[0])
    hostname: str = fact(socket.gethostname)
    resolved: Mapping[str, Sequence[str] | None] = fact(resolve_names)
    """Addresses of names: this host's, localhost, that of MASTER_ADDR. None if there was no answer in time."""
    interfaces: Sequence[Interface] = fact(find_interfaces)
    unreachable: Mapping[str, str] = fact(find_unreachable)
    """Interfaces at whose address this machine does not reach itself, and why."""
    port_refusal: str = fact(try_port)
    clock: str = fact(lambda: read("/sys/devices/system/clocksource/clocksource0/current_clocksource"))
    """What the kernel reads the time from."""
    age: float = fact(lambda: time.time() - Path(__file__).stat().st_mtime)
    """Seconds since this program's file was written, by this machine's clock."""
    shared_memory: int | None = fact(read_shared_memory)
    limits: Mapping[str, int] = fact(read_limits)
    """Soft limits by name, -1 for none."""
    memory: int = fact(lambda: read_memory("MemTotal"))
    available_memory: int = fact(lambda: read_memory("MemAvailable"))
    swapped: int = fact(read_swapped)
    """Bytes of memory that are swapped out."""
    cores: int = fact(usable_cores)
    quota: float = fact(read_quota)
    core_seconds: Mapping[int, float] = fact(measure_cores)
    governors: Sequence[str] = fact(find_governors)
    """Policies of the CPU's frequency with their drivers, each once: "powersave of acpi-cpufreq"."""
    temporary: tuple[str, int] = fact(find_temporary)
    shadows: Sequence[tuple[str, str]] = fact(find_shadows)
    missing_paths: Sequence[str] = fact(lambda: [str(each) for each in python_path() if not each.exists()])
    """Folders of PYTHONPATH that are not there."""
    gpus: int = fact(lambda: len([*Path("/proc/driver/nvidia/gpus").glob("*")]))
    has_infiniband: bool = fact(lambda: any(Path("/sys/class/infiniband").glob("*")))


def check_python(machine: Machine) -> Iterator[Finding]:
    if re.search(r"[a-z]", machine.python):
        saw = f"Python {machine.python} is not a release"
        yield warning(saw, "torch is built and tested for releases of Python", "install a release of Python")


def check_import_path(machine: Machine) -> Iterator[Finding]:
    for module, file in machine.shadows:
        kind = error if module in ESSENTIAL else warning
        saw = f"{file} would be imported in the place of {module}"
        yield kind(saw, "Python looks in a script's folder and in PYTHONPATH first", f"rename {file}")
    for folder in machine.missing_paths:
        yield warning(f"PYTHONPATH names {folder}, which is missing", "its folders exist", "unset or correct it")


def check_host_name(machine: Machine) -> Iterator[Finding]:
    name, chosen = machine.hostname, any(map(machine.environ.get, VARIABLES))
    addresses = machine.resolved.get(name, ["10.0.0.1"])
    kind = error if machine.several_hosts else warning
    others = [each.name for each in machine.interfaces if each.is_usable and each.name != LOOPBACK_INTERFACE]
    fix = f"correct /etc/hosts, or export GLOO_SOCKET_IFNAME={others[0] if others else 'INTERFACE'}"
    rule = "unless told otherwise, gloo listens at the address that the host's name resolves to"
    if addresses is None:
        yield kind(f"the name {name} does not resolve within {NETWORK_LIMIT:g} s", rule, fix)
    elif not addresses and not chosen:
        yield kind(f"the name {name} resolves to nothing", rule, fix)
    elif addresses and all(map(is_loopback, addresses)) and others and not chosen:
        saw = f"the name {name} resolves to {addresses[0]}, which no other host can reach"
        yield kind(saw, rule, fix)


def check_loopback(machine: Machine) -> Iterator[Finding]:
    rule, fix = "ranks of one host meet on loopback", f"ip link set {LOOPBACK_INTERFACE} up; correct /etc/hosts"
    for each in machine.interfaces:
        if each.name == LOOPBACK_INTERFACE and not each.is_usable:
            yield error(f"the loopback interface {each.name} is down or has no address", rule, fix)
    local = machine.resolved.get("localhost", ["127.0.0.1"])
    if not local or not any(map(is_loopback, local)):
        yield error(f"localhost resolves to {', '.join(local or ['nothing'])}", rule, fix)


def match_interfaces(value: str, interfaces: Sequence[Interface], exact: bool) -> list[Interface]:
    """The interfaces that a value of such a variable stands for. NCCL's has prefixes of names, with = before it exact
    names, with ^ those that are not to be used. Source:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname"""
    excludes, exact = value.startswith("^"), exact or "=" in value[:2]
    names = value.lstrip("^=").split(",")
    matches = [any(each.name == name if exact else each.name.startswith(name) for name in names) for each in interfaces]
    return [each for each, found in zip(interfaces, matches, strict=True) if found is not excludes]


def check_interface_variables(machine: Machine) -> Iterator[Finding]:
    usable = [each for each in machine.interfaces if each.is_usable]
    names = ", ".join(each.name for each in usable)
    rule = "it names interfaces that are up and have an address"
    for variable, backend in VARIABLES.items():
        value, exact = machine.environ.get(variable, ""), backend.trusts_host_name
        if not value or not machine.interfaces:
            continue
        found = match_interfaces(value, usable, exact)
        outer = [each.name for each in usable if each.name != LOOPBACK_INTERFACE] or ["INTERFACE"]
        fix = f"export {variable}={outer[0]}, or unset {variable}"
        if not found or (exact and len(found) < len(value.split(","))):
            yield error(f"{variable}={value}, and what is up and has an address is {names}", rule, fix)
        elif machine.several_hosts and all(each.name == LOOPBACK_INTERFACE for each in found):
            yield error(f"{variable}={value} in a world of several hosts", "no other host can reach loopback", fix)
        elif len({each.mtu for each in found}) > 1:
            saw = f"{variable}={value}: {', '.join(f'{each.name} has MTU {each.mtu}' for each in found)}"
            yield warning(saw, "links that share the traffic take packets of one size", "ip link set NAME mtu BYTES")


def check_mtu(machine: Machine) -> Iterator[Finding]:
    for each in machine.interfaces:
        if each.is_usable and each.mtu < 1280:
            saw = f"{each.name} has an MTU of {each.mtu}"
            rule = "1280 is the least that IPv6 allows, 1500 is usual, 9000 is best for large tensors"
            yield warning(saw, rule, f"ip link set {each.name} mtu 1500, if the network takes such packets")


def check_firewall(machine: Machine) -> Iterator[Finding]:
    for name, why in machine.unreachable.items():
        saw = f"a connection to this machine's own address on {name} fails: {why}"
        rule = "ranks connect to each other at ports that the system chooses"
        yield error(saw, rule, "have the firewall accept TCP between the hosts that train, at all ports")


def check_master_address(machine: Machine) -> Iterator[Finding]:
    name = machine.environ.get("MASTER_ADDR", "")
    if name and not (addresses := machine.resolved.get(name)):
        why = f"does not resolve within {NETWORK_LIMIT:g} s" if addresses is None else "resolves to nothing"
        fix = "export MASTER_ADDR with the IP address of the first host"
        yield error(f"MASTER_ADDR={name} {why}", "all ranks meet at MASTER_ADDR", fix)


def check_master_port(machine: Machine) -> Iterator[Finding]:
    port = machine.environ.get("MASTER_PORT", "")
    fix = f"take another port; ss -ltnp 'sport = :{port or DEFAULT_PORT}' tells who has it"
    if machine.port_refusal:
        default = "" if port else ", torchrun's default"
        saw = f"nothing can listen at port {port or DEFAULT_PORT}{default}: {machine.port_refusal}"
        yield (error if port else warning)(saw, "rank 0 listens at MASTER_PORT, which must be free", fix)


def check_proxies(machine: Machine) -> Iterator[Finding]:
    given = {name.lower(): value for name, value in machine.environ.items()}
    spared = re.split(r"[\s,]+", given.get("no_proxy", ""))
    if given.get("http_proxy") and not {"*", "localhost", "127.0.0.1"} & {*spared}:
        saw = "http_proxy is set, and no_proxy does not contain localhost"
        rule = "what ranks serve over HTTP on this machine is not to be asked of a proxy"
        yield warning(saw, rule, "export no_proxy=localhost,127.0.0.1 and the names of the hosts")


def check_clock(machine: Machine) -> Iterator[Finding]:
    if machine.age < -86400:
        saw = f"this program was installed {-machine.age / 86400:.0f} days in the future"
        rule = "files, certificates and caches are compared by time"
        yield error(saw, rule, "set the clock: timedatectl set-ntp true")
    if machine.clock and machine.clock not in CLOCKS:
        saw = f"the kernel reads the time from {machine.clock}"
        rule = "from tsc or a virtual clock a reading takes 20 ns, from others it can take 1 us and more"
        yield warning(saw, rule, "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource")


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    size = machine.shared_memory
    if size is not None and size < 2**30:
        kind = error if machine.gpus > 1 or size < 2**24 else warning
        rule = "NCCL and DataLoader's workers pass tensors through /dev/shm: 1 GiB at least"
        fix = "start the container with --shm-size=8g or --ipc=host; else mount -o remount,size=8G /dev/shm"
        yield kind(f"/dev/shm has {format_bytes(size)}" if size else "there is no /dev/shm", rule, fix)


def check_limits(machine: Machine) -> Iterator[Finding]:
    for name, command, counted in LIMITS:
        if 0 <= (limit := machine.limits.get(name, -1)) < LEAST:
            rule = f"a rank has {counted} for every other rank, for workers and files: {LEAST} at least"
            kind = error if limit < LEAST / 4 else warning
            yield kind(f"{command} is {limit}", rule, f"{command} 65536, or in /etc/security/limits.conf")
    if machine.has_infiniband and 0 <= (limit := machine.limits.get("MEMLOCK", -1)) < 2**30:
        rule = "InfiniBand locks the memory that it transfers: unlimited"
        fix = "ulimit -l unlimited; of a container: --ulimit memlock=-1"
        yield error(f"ulimit -l is {format_bytes(limit)}", rule, fix)


def check_memory(machine: Machine) -> Iterator[Finding]:
    free, rule = machine.available_memory, "torch takes 0.3 GiB in each rank before there is a model"
    if free < 2**30:
        kind = error if free < 2**28 else warning
        yield kind(f"{format_bytes(free)} of memory are available", rule, "end other programs, or take fewer ranks")
    if machine.swapped > machine.memory / 10:
        saw = f"{format_bytes(machine.swapped)} of memory are swapped out"
        yield warning(saw, "a rank whose memory is on a disk makes all others wait", "end other programs; swapoff -a")


def check_cores(machine: Machine) -> Iterator[Finding]:
    if machine.quota < machine.cores:
        saw = f"{machine.cores} cores are seen, and the container may use the time of {machine.quota:g}"
        rule = "threads beyond the quota are stopped, all at once, for most of every 0.1 s"
        fix = f"raise the quota, or taskset -c 0-{max(0, math.floor(machine.quota) - 1)}"
        yield warning(saw, rule, fix)


def check_threads(machine: Machine) -> Iterator[Finding]:
    most = max(1, math.floor(min(machine.cores, machine.quota)))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = machine.environ.get(name, "1").split(",")[0]
        rule, fix = "each rank's threads, times the ranks, are no more than the cores", f"export {name}={most}, or less"
        if not value.isdigit() or not int(value):
            yield error(f"{name}={value} is not a number of threads", rule, fix)
        elif int(value) > most:
            yield warning(f"{name}={value} on {most} core{'s' * (most > 1)}", rule, fix)


def check_core_speed(machine: Machine) -> Iterator[Finding]:
    if slow := find_slow_cores(machine.core_seconds):
        times = [machine.core_seconds[core] / median_low(machine.core_seconds.values()) for core in slow]
        saw = f"up to {max(times):.1f} times as long as others need: cores {', '.join(map(str, slow))}"
        rule = "all ranks wait for the slowest at every step"
        yield warning(saw, rule, "look for what runs there, heat and power limits; keep ranks off them: taskset -c")


def check_governor(machine: Machine) -> Iterator[Finding]:
    for each in machine.governors:
        if each.startswith("powersave") and "pstate" not in each:
            rule = "with powersave the cores stay at their lowest frequency"
            yield warning(f"the governor is {each}", rule, "cpupower frequency-set -g performance")


def check_disk(machine: Machine) -> Iterator[Finding]:
    (folder, free), rule = machine.temporary, "torch, torchrun and compilers write files in TMPDIR: 1 GiB at least"
    if not folder:
        yield error("no folder for temporary files can be written", rule, "export TMPDIR with one that can be written")
    elif free < 2**30:
        kind = error if free < 2**24 else warning
        saw = f"{format_bytes(free)} are free in {folder}"
        yield kind(saw, rule, "make room there, or export TMPDIR with another folder")


CHECKS = find_checks(globals())
