"""The second tier: torch, imported and tried in a process of its own, which has a deadline and may
crash.

`examine` starts that process, which writes what it finds out, fact by fact: what it does not get to
is what it died of.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from playground.base.errors import PlaygroundError
from playground.base.remote import remote
from playground.tools.doctor.checks import Fault, error, warning
from playground.ui.units import plural
from playground.world.backends import get_backend
from playground.world.backends.nccl import driver_supports
from playground.world.launcher.launch import launch

TRY = remote("playground.tools.doctor.software:try_torch")
TRIED = ("gloo", "nccl")
"""Backends that torch brings along."""
ELEMENTS = 2**18
"""Number of elements of the tensor that is summed: 1 MiB."""
REINSTALL = "pip install --force-reinstall torch torchvision"


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The facts of torch here."""

    version: str = ""
    """Empty if it is not installed."""
    stage: str = ""
    """The stage at which the process ended or its time was up; empty if it came to its end."""
    problem: str = ""
    """How it ended."""
    late: float = 0.0
    """The time that it had, in seconds, if that was up; else 0."""
    import_seconds: float = 0.0
    cuda: str = ""
    """Version of CUDA that torch was built for; empty for none."""
    driver: tuple[int, ...] = ()
    """The newest CUDA that the GPU's driver knows; empty without a driver."""
    visible: int = 0
    """Number of GPUs that torch shows."""
    sums: Mapping[str, str] = field(default_factory=dict)
    """The problem that ranks had when they added up a tensor, by backend; empty for none."""
    gpus: int = 0
    """Number of GPUs that nvidia-smi lists."""


def version_of(package: str) -> str:
    """The version of a package that is installed, by its metadata; empty if it is not."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def examine(timeout: float) -> TorchFacts:
    """Start the process, and wait for it `timeout` seconds at most."""
    if not (version := version_of("torch")):
        return TorchFacts()
    facts: dict[str, object] = {"version": version, "stage": "importing torch"}
    environ = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    command = [sys.executable, "-c", f"from {TRY.module} import try_torch; try_torch()"]
    try:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout
        )
        code, out, err = done.returncode, done.stdout, done.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        code, out, err = 0, late.stdout or b"", ""
        facts["late"] = timeout
    for line in out.splitlines():
        with contextlib.suppress(ValueError):  # what somebody else has printed
            facts.update(json.loads(line))
    if facts["stage"] and "late" in facts:
        facts["problem"] = f"no end within {timeout:g} s"
    elif facts["stage"]:
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        facts["problem"] = [ended, *err.strip().splitlines()][-1]
    facts["gpus"] = count_gpus()
    return TorchFacts(**facts)  # type: ignore[arg-type]  # of our own process


def summarize(torch: TorchFacts) -> str:
    return (
        "" if torch.problem else f"torch {torch.version}, imported in {torch.import_seconds:.1f} s"
    )


def count_gpus() -> int:
    """The number of GPUs that nvidia-smi lists; 0 where there is no such program."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=10)
        return len(listed.stdout.splitlines())
    return 0


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def try_torch() -> None:
    """The program of that process."""
    started = time.perf_counter()
    import torch

    tell(import_seconds=time.perf_counter() - started, cuda=torch.version.cuda or "")
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tell(driver=driver_supports() or (), visible=visible)
    sums = {}
    for backend in map(get_backend, TRIED):
        if ranks := 2 if backend.device_type == "cpu" else min(2, visible):
            tell(stage=f"adding up on {plural(ranks, 'rank')} with {backend.name}")
            sums[backend.name] = add_on_ranks(backend.name, ranks)
    tell(sums=sums, stage=f"calling an operator of torchvision {version_of('torchvision')}")
    if version_of("torchvision"):
        from torchvision.ops import nms

        nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1), 0.5)
    tell(stage="")


def add_on_ranks(backend: str, ranks: int) -> str:
    """The problem that ranks had when they added up a tensor, or nothing."""
    try:
        wrong = sum(launch(add_up, ranks, backend=backend))
    except (PlaygroundError, OSError) as failure:
        return str(failure).partition("\n")[0]
    return f"{wrong:,} of {ranks * ELEMENTS:,} elements of a sum are wrong" if wrong else ""


def add_up(rank: int, size: int) -> int:
    """The number of elements of a sum that are wrong."""
    import torch
    import torch.distributed as dist

    from playground.world.backends import device

    tensor = torch.full((ELEMENTS,), rank + 1.0, device=device())
    dist.all_reduce(tensor)
    return int((tensor != size * (size + 1) / 2).sum())


def check_torch_import(torch: TorchFacts) -> Iterator[Fault]:
    if not torch.version:
        yield error(
            "torch is not installed", "every rank imports torch", "pip install torch torchvision"
        )
    elif torch.late:
        check = "python -m playground doctor --check torch"
        yield warning(
            f"{torch.stage} has not finished within {torch.late:g} s",
            "torch is imported, and ranks of this machine add up a tensor, within --timeout",
            f"on a busy machine, raise --timeout: {check} --timeout {5 * torch.late:g}",
        )
    elif torch.problem:
        rule = (
            "a process imports torch, ranks of this machine add up a tensor, torchvision is "
            "built for this torch"
        )
        yield error(f"a process ended while {torch.stage}: {torch.problem}", rule, REINSTALL)


def check_gpu_driver(torch: TorchFacts) -> Iterator[Fault]:
    fix = (
        "install a torch built for this driver's CUDA, or update the driver; unset "
        "CUDA_VISIBLE_DEVICES"
    )
    if torch.gpus and not torch.cuda:
        saw = f"{torch.gpus} GPUs, and torch {torch.version} is built without CUDA"
        yield warning(saw, "only a torch built with CUDA uses them", fix)
    elif torch.gpus and torch.sums and not torch.visible:
        driver = ".".join(map(str, torch.driver)) or "none"
        saw = (
            f"nvidia-smi lists {torch.gpus} GPUs, and torch, built for CUDA {torch.cuda}, sees "
            f"none; the driver knows CUDA {driver}"
        )
        yield error(saw, "torch sees what driver and container show it", fix)


def check_all_reduce(torch: TorchFacts) -> Iterator[Fault]:
    for backend, problem in torch.sums.items():
        if problem:
            fix = f"to see more: python -m playground hello --backend {backend}"
            saw = f"ranks on loopback with {backend}: {problem}"
            yield error(saw, "an all-reduce has the right sum", fix)


CHECKS = (check_torch_import, check_gpu_driver, check_all_reduce)
