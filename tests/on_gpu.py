"""Every lesson on nccl and the GPU tier of the tests, with as many ranks as this machine can have: one table.

    make gpu
    python tests/on_gpu.py        # where the packages are installed already

The table is Markdown: lesson, ranks, seconds, exit code, verdict (what the lesson shows, or its last word). The exit
code is 1 if anything failed. Ten minutes are enough; what has not begun by then is not begun.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from playground.lessons.pipeline.settings import BLOCKS
from playground.remote.agents import AGENTS
from playground.runtime.backends import BACKENDS
from playground.runtime.backends.nccl import SHARES_A_GPU, driver_version, format_version, nccl_version
from playground.runtime.errors import UsageError

DEADLINE = 600.0
"""Seconds for everything."""
SMALL = ("--epochs", "2")
PLAYGROUND = (sys.executable, "-m", "playground")


@dataclass(frozen=True)
class Run:
    name: str
    ranks: int
    command: tuple[str, ...]
    verdict: Callable[[str], str]
    expected: int = 0
    """The exit code."""
    environ: tuple[tuple[str, str], ...] = ()


def last_line(out: str) -> str:
    lines = out.strip().splitlines()
    return lines[-1] if lines else ""


def refused(out: str) -> str:
    return f"refused, as it should be: {last_line(out)}"


def ladder_verdict(out: str) -> str:
    """How the two best rungs compare with DistributedDataParallel, and how much DDP hides."""
    rungs = {rung["rung"]: rung for rung in json.loads(out)["rungs"]}
    ratios = [f"{name} {rungs[name]['p50'] / rungs['ddp']['p50']:.2f} x ddp's step" for name in ("flat", "overlapped")]
    return ", ".join([*ratios, f"ddp hides {rungs['ddp']['hidden']:.0%}"])


def bench_verdict(out: str) -> str:
    rows = json.loads(out)["rows"]
    return f"{len(rows)} rows, {sum(row['wrong'] for row in rows)} wrong elements"


def runs(ranks: int, gpus: int, sharing: bool, data_dir: str) -> Iterator[Run]:
    """Everything, in the order of the path; then what must be refused; then the tests."""
    data = ("--data-dir", data_dir)

    def lesson(name: str, *words: str, verdict: Callable[[str], str] = last_line, **more: Any) -> Run:
        command = (*PLAYGROUND, name, "--backend", "nccl", "-n", str(ranks), *words)
        return Run(
            " ".join([name, *words[: -len(data) if data[0] in words else None]]), ranks, command, verdict, **more
        )

    yield lesson("hello")
    if ranks > 1:
        yield lesson("p2p")
    yield lesson("collectives")
    if ranks > 1:
        yield lesson("allreduce")
    devices = ",".join(f"cuda:{number}" for number in range(gpus))
    yield Run(f"data-parallel --devices {devices}", 1, (*PLAYGROUND, "data-parallel", "--devices", devices), last_line)
    for sync in ("per-parameter", "flat", "overlapped", "parameters"):
        yield lesson("sgd", "--sync", sync, *SMALL, *data)
    for all_reduce in ("ring", "auto"):
        yield lesson("sgd", "--all-reduce", all_reduce, *SMALL, *data)
    yield lesson("ladder", "--json", *data, verdict=ladder_verdict)
    yield lesson("ladder", "--json", *data, verdict=ladder_verdict, environ=(("TORCH_DIST_USE_NCCL2", "0"),))
    yield lesson("ddp", *SMALL, *data)
    yield lesson("ddp", "--lab", *data)
    yield lesson("prove", *data)
    if BLOCKS % ranks == 0:
        yield lesson("pipeline", *data)
    if ranks > 1:
        yield lesson("rpc")
        for over in AGENTS:
            yield lesson("parameter-server", "--over", over, "--steps", "20", *data)
    yield lesson("bench", "--collective", "all", "--limit", "-e", "64M", "--json", verdict=bench_verdict)
    if ranks > 1:
        yield lesson("bench", "--algorithm", "all", "-e", "4M", "--json", verdict=bench_verdict)
    if not sharing:
        command = (*PLAYGROUND, "hello", "--backend", "nccl", "-n", str(gpus + 1))
        yield Run("hello", gpus + 1, command, refused, expected=2)
    tests = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(Path(__file__).parent))
    yield Run("pytest -m gpu", ranks, tests, last_line)


def carry_out(run: Run, limit: float) -> tuple[bool, str]:
    """Whether it ended as expected, and its row."""
    started = time.perf_counter()
    environ = {**os.environ, **dict(run.environ)}
    try:
        done = subprocess.run(run.command, capture_output=True, text=True, timeout=limit, env=environ, check=False)
        code, out, err = str(done.returncode), done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        code, out, err = "none", "", f"not done after {limit:.0f} s"
    fine = code == str(run.expected)
    verdict = run.verdict(out or err) if fine else last_line(err or out)
    if not fine:
        sys.stderr.write(f"{' '.join(run.command)}\n{out[-4000:]}\n{err[-8000:]}\n")
    name = " ".join([*(f"{name}={value}" for name, value in run.environ), run.name])
    seconds = time.perf_counter() - started
    return fine, f"| `{name}` | {run.ranks} | {seconds:.1f} | {code} | {verdict.replace('|', '/')} |"


def main() -> int:
    nccl = BACKENDS["nccl"]
    try:
        nccl.check(1)
    except UsageError as why:
        print(f"no GPU tier here: {why}", file=sys.stderr)
        return why.exit_code
    gpus, sharing = torch.cuda.device_count(), nccl_version() >= SHARES_A_GPU
    ranks = 2 if gpus == 1 and sharing else gpus
    names = sorted({torch.cuda.get_device_name(number) for number in range(gpus)})
    shared = f" shared by {ranks} ranks" if ranks > gpus else ""
    print(
        f"{gpus} x {', '.join(names)}{shared}; driver {driver_version()}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, NCCL {format_version(nccl_version())}, Python {platform.python_version()}\n"
    )
    print("| lesson | ranks | seconds | exit code | verdict |\n|---|---|---|---|---|", flush=True)
    end, all_fine = time.monotonic() + DEADLINE, True
    with tempfile.TemporaryDirectory() as folder:
        data_dir = os.environ.get("PLAYGROUND_DATA_DIR", folder)
        for run in runs(ranks, gpus, sharing, data_dir):
            fine, row = carry_out(run, max(1.0, end - time.monotonic()))
            all_fine &= fine
            print(row, flush=True)
    return 0 if all_fine else 1


if __name__ == "__main__":
    sys.exit(main())
