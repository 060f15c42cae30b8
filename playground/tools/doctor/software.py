"""The second tier: torch, imported and tried in a process of its own, which has a deadline and may crash.

`examine` starts that process, which writes what it finds out, fact by fact: what it does not get to is what it died of.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from playground.runtime.backends import BACKENDS, get_backend
from playground.runtime.backends.nccl import driver_supports
from playground.runtime.errors import UsageError
from playground.runtime.meeting.process_end import end_with_parent
from playground.runtime.meeting.rendezvous import Rendezvous, prepare_rendezvous
from playground.runtime.remote import remote
from playground.tools.doctor import Finding, error, find_checks, warning

TRY = remote("playground.tools.doctor.software:try_torch")
ELEMENTS = 2**18
"""Number of elements of the tensor that is summed: 1 MiB."""
SLOW_IMPORT = 20.0
"""Seconds; from a local disk torch takes 2."""
REINSTALL = "pip install --force-reinstall torch torchvision"
SMI = "nvidia-smi --query-gpu=name,memory.used,memory.total,utilization.gpu --format=csv,noheader,nounits"


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What is known of torch here."""

    version: str = ""
    """Empty if it is not installed."""
    torchvision: str = ""
    stage: str = ""
    """What the process was doing when it ended or its time was up; empty if it came to its end."""
    problem: str = ""
    """How it ended."""
    import_seconds: float = 0.0
    cuda: str = ""
    """Version of CUDA that torch was built for; empty for none."""
    driver: tuple[int, ...] = ()
    """The newest CUDA that the GPU's driver knows; empty without a driver."""
    visible: int = 0
    """Number of GPUs that torch shows."""
    built_in: Mapping[str, bool] = field(default_factory=dict)
    """Whether torch was built with a backend."""
    sums: Mapping[str, str] = field(default_factory=dict)
    """What went wrong when two ranks added up a tensor, by backend; empty if nothing did."""
    gpus: tuple[tuple[str, int, int, int], ...] = ()
    """Name, MiB of memory in use and in all, and utilisation in percent, of each GPU of the machine."""


def version_of(package: str) -> str:
    """The version of a package that is installed, by its metadata; empty if it is not."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def examine(timeout: float) -> Torch:
    """Start the process, and wait for it `timeout` seconds at most."""
    facts: dict[str, object] = {"version": version_of("torch"), "torchvision": version_of("torchvision")}
    if not facts["version"]:
        return Torch()
    facts["stage"] = "importing torch"
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    end_with_us = partial(end_with_parent, os.getpid(), signal.SIGKILL, ctypes.CDLL(None))
    child = subprocess.Popen(
        [sys.executable, "-m", TRY.module], env=environ, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=end_with_us if sys.platform == "linux" else None,
    )  # fmt: skip
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()[0], f"no end within {timeout:g} s"
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    for line in out.splitlines():
        with contextlib.suppress(ValueError):  # what somebody else has printed
            facts.update(json.loads(line))
    if facts["stage"]:
        ended = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit code {child.returncode}"
        facts["problem"] = [ended, *err.strip().splitlines()][-1]
    facts["gpus"] = find_gpus()
    return Torch(**facts)  # type: ignore[arg-type]  # of our own process


def find_gpus() -> tuple[tuple[str, int, int, int], ...]:
    """The GPUs that nvidia-smi lists; none where there is no such program."""
    if not shutil.which("nvidia-smi"):
        return ()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(SMI.split(), capture_output=True, text=True, timeout=10).stdout
        rows = re.findall(r"^(.+), (\d+), (\d+), (\d+)$", listed, re.MULTILINE)
        return tuple((name, int(used), int(total), int(busy)) for name, used, total, busy in rows)
    return ()


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def try_torch() -> None:
    """The program of that process."""
    started = time.perf_counter()
    import torch
    import torch.distributed as dist

    tell(import_seconds=time.perf_counter() - started, cuda=torch.version.cuda or "", stage="looking for GPUs")
    built_in = {name: dist.is_available() and getattr(dist, f"is_{name}_available")() for name in ("gloo", "nccl")}
    tell(built_in=built_in, driver=driver_supports() or (), visible=torch.cuda.device_count())
    sums = {}
    for name in (name for name, is_built_in in built_in.items() if is_built_in):
        tell(stage=f"adding up on two ranks with {name}")
        with contextlib.suppress(UsageError):  # this machine has not what it needs
            get_backend(name).check(2)
            sums[name] = add_on_two_ranks(name)
    tell(sums=sums, stage="")


def add_on_two_ranks(backend: str) -> str:
    """Fork two ranks that add up a tensor; the problem they had, or nothing."""
    rendezvous, listener = prepare_rendezvous()
    reading, writing = os.pipe()
    for rank in range(2):
        if os.fork() == 0:
            try:
                add_up(rank, backend, rendezvous, listener if rank == 0 else None)
            except BaseException as failure:
                said = traceback.format_exception_only(failure)[-1].strip().splitlines()[0]
                os.write(writing, f"rank {rank}: {said}\n".encode())
            os._exit(0)
    os.close(writing)
    statuses = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)]
    with open(reading, encoding="utf-8") as problems:
        deaths = [f"a rank was killed by {signal.Signals(-status).name}\n" for status in statuses if status < 0]
        return "".join([*deaths, *problems]).partition("\n")[0]


def add_up(rank: int, backend: str, rendezvous: Rendezvous, listener: object) -> None:
    """Rank `rank` of 2. Raises `ValueError` for a wrong sum."""
    import torch
    import torch.distributed as dist

    from playground.runtime.rank.world import run_in_world

    def all_reduce(rank: int, size: int) -> int:
        tensor = torch.full((ELEMENTS,), rank + 1.0, device=get_backend(backend).device())
        dist.all_reduce(tensor)
        return int((tensor != 3).sum())

    wrong = run_in_world(rank, 2, all_reduce, backend, rendezvous=rendezvous, listener=listener)  # type: ignore[arg-type]
    if wrong:
        raise ValueError(f"{wrong:,} of {ELEMENTS:,} elements of a sum are wrong")


def check_torch_import(torch: Torch) -> Iterator[Finding]:
    if not torch.version:
        yield error("torch is not installed", "every rank imports torch", "pip install torch torchvision")
    elif torch.problem:
        rule = "a process imports torch, and two ranks of this machine add up a tensor"
        yield error(f"a process ended while {torch.stage}: {torch.problem}", rule, REINSTALL)
    elif torch.import_seconds > SLOW_IMPORT:
        saw = f"importing torch took {torch.import_seconds:.0f} s"
        yield warning(saw, "from a local disk it takes 2 s", "install torch on a local disk, not on a shared one")


def check_torch_versions(torch: Torch) -> Iterator[Finding]:
    ours, vision = (re.match(r"(\d+)\.(\d+)", each) for each in (torch.version, torch.torchvision))
    if ours and vision and (ours[1], vision[1]) == ("2", "0") and int(vision[2]) != int(ours[2]) + 15:
        saw = f"torch {torch.version} and torchvision {torch.torchvision}"
        yield error(saw, "torchvision 0.(N + 15) is built for torch 2.N", REINSTALL)


def check_built_in_backends(torch: Torch) -> Iterator[Finding]:
    for backend in BACKENDS.values():
        needed = backend.device_type == "cpu" or (torch.gpus and torch.cuda)
        if needed and not torch.built_in.get(backend.name, True):
            saw = f"this torch ({torch.version}) is built without {backend.name}"
            yield error(saw, f"ranks need {backend.name}: {backend.summary}", "install a torch from pytorch.org")


def check_gpu_driver(torch: Torch) -> Iterator[Finding]:
    driver = ".".join(map(str, torch.driver))
    fix = "install a torch built for this driver's CUDA, or update the driver"
    if torch.gpus and not torch.cuda:
        saw = f"{len(torch.gpus)} GPUs, and torch {torch.version} is built without CUDA"
        yield warning(saw, "only a torch built with CUDA uses them", fix)
    elif torch.cuda and torch.driver and torch.driver[0] < int(torch.cuda.partition(".")[0]):
        saw = f"torch is built for CUDA {torch.cuda}, and the GPU's driver knows CUDA {driver}"
        yield error(saw, "a driver runs programs built for its own major version or an older one", fix)
    elif torch.gpus and not torch.visible and not torch.stage:
        saw = f"nvidia-smi lists {len(torch.gpus)} GPUs, and torch sees none"
        yield error(saw, "torch sees what CUDA_VISIBLE_DEVICES and the container show it", "unset CUDA_VISIBLE_DEVICES")


def check_all_reduce(torch: Torch) -> Iterator[Finding]:
    for backend, problem in torch.sums.items():
        if problem:
            saw = f"two ranks on loopback with {backend}: {problem}"
            yield error(
                saw, "an all-reduce of two ranks ends with the right sum", "python -m playground hello tells more"
            )


def check_gpus(torch: Torch) -> Iterator[Finding]:
    kinds = sorted({name for name, *_ in torch.gpus})
    if len(kinds) > 1:
        fix = "train on GPUs of one kind: export CUDA_VISIBLE_DEVICES"
        yield warning(f"GPUs of {len(kinds)} kinds: {', '.join(kinds)}", "all ranks wait for the slowest", fix)
    for number, (_, used, total, percent) in enumerate(torch.gpus):
        if used > total / 10 or percent > 10:
            saw = f"GPU {number} is busy: {percent} % of its time, {used:,} of {total:,} MiB"
            yield warning(saw, "a rank has a GPU to itself", "nvidia-smi tells who uses it")


CHECKS = find_checks(globals())


if __name__ == "__main__":
    try_torch()
