"""Every lesson and tool on nccl and the GPU tier of the tests, in one table: what may hang first.

    make gpu        # two ranks where one GPU can be shared, else a rank for each GPU
    make gpu N=8

The table is Markdown: lesson, ranks, seconds, exit code, verdict (what the row shows, or its last
word). Each row is printed as soon as it is done. The exit code is 1 if anything failed. On a
simulated GPU no figure is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from playground.base.errors import UsageError
from playground.world.backends import BACKENDS
from playground.world.backends.nccl import (
    SHARES_A_GPU,
    driver_version,
    format_version,
    nccl_version,
)
from playground.world.simulated_gpu.environment import GPUS

SIMULATED = "SIMULATED: no GPU has run this, and none of it says how fast one is"
PROGRAMS = {
    "pytest": ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)),
    "torchrun": ("-m", "torch.distributed.run", "--standalone"),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`ranks` is how many most rows have. `shares`: whether several ranks may use one GPU."""

    gpus: int
    ranks: int
    shares: bool


FOR = SimpleNamespace(
    pair=lambda machine: machine.ranks > 1,
    several_gpus=lambda machine: machine.gpus > 1,
    shares_with_four=lambda machine: machine.shares and machine.gpus < 4,
    cannot_share=lambda machine: not machine.shares,
    real=lambda machine: (
        not is_simulated()
    ),  # beside a simulated one `make test` and `make stress` have them run
)
"""Which machines a row is for."""
RANKS = SimpleNamespace(
    one=lambda machine: 1,
    four=lambda machine: 4,
    one_too_many=lambda machine: machine.gpus + 1,
    stages=lambda machine: min(machine.ranks, 6),
)
"""How many ranks a row has; of a pipeline no more than the batch has microbatches."""


def last_line(out: str) -> str:
    lines = out.strip().splitlines()
    return lines[-1] if lines else ""


def refused(out: str) -> str:
    return f"refused, as it should be: {last_line(out)}"


def steps_verdict(out: str) -> str:
    """How the two best variants compare with DistributedDataParallel, and how much DDP hides."""
    variants = {variant["name"]: variant for variant in json.loads(out)["variants"]}
    ratios = [
        f"{name} {variants[name]['p50'] / variants['ddp']['p50']:.2f} x ddp's step"
        for name in ("flat", "overlapped")
    ]
    return ", ".join([*ratios, f"ddp hides {variants['ddp']['hidden']:.0%}"])


def bench_verdict(out: str) -> str:
    rows = json.loads(out)["rows"]
    return f"{len(rows)} rows, {sum(row['wrong'] for row in rows)} wrong elements"


@dataclass(frozen=True)
class Row:
    """A command. In its words {on} stands for the backend and the number of ranks, for where
    the data is, {few} for that and a short training, {folder} for a folder of this run alone,
    {gpus} for the number of GPUs."""

    words: str
    needs: Callable[[Machine], bool] = lambda machine: True
    """Which machines it is for."""
    ranks: Callable[[Machine], int] = lambda machine: machine.ranks
    verdict: Callable[[str], str] = last_line
    environ: Mapping[str, str] = field(default_factory=dict)
    code: int = 0
    """The exit code that it should have."""
    limit: float = 180.0
    """Seconds that it may take."""

    @property
    def name(self) -> str:
        """Without what is the same in many rows."""
        words = [
            word
            for word in self.words.replace("{folder}/", "").split()
            if word not in ("{on}", "{few}")
        ]
        return " ".join([*(f"{name}={value}" for name, value in self.environ.items()), *words])

    def command(self, machine: Machine, folder: Path) -> list[str]:
        filled = self.words.format(
            on=f"--backend nccl -n {self.ranks(machine)}", few="--epochs 2",
            folder=shlex.quote(str(folder)), gpus=machine.gpus, ranks=self.ranks(machine),
        )  # fmt: skip
        program, *words = shlex.split(filled)
        return [sys.executable, *PROGRAMS.get(program, ("-m", "playground", program)), *words]


OLD = {"TORCH_DIST_USE_NCCL2": "0"}
"""torch's former ProcessGroupNCCL."""
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}
ROWS = (
    # What may hang: a kernel's first launch beside a receive.
    Row("pipeline {on} --timeout 30", needs=FOR.pair, ranks=RANKS.stages),
    Row("pipeline {on} --timeout 30", needs=FOR.pair, ranks=RANKS.stages, environ=EAGER),
    Row("tensor --backend nccl -n 2 --steps 5", needs=FOR.pair),
    Row("context --backend nccl -n 2", needs=FOR.pair),
    Row("experts --backend nccl -n 2 --steps 5", needs=FOR.pair),
    Row("mesh --backend nccl -n 2 --steps 2 --timeout 60", needs=FOR.pair),
    # The same bits. NVLS takes several GPUs.
    Row("elastic {on}"),
    Row("checkpoint {on}"),
    Row("elastic {on}", needs=FOR.several_gpus, environ={"NCCL_NVLS_ENABLE": "0"}),
    Row("doctor --check torch"),
    # Recordings.
    Row("p2p {on} --see {folder}/p2p.playground", needs=FOR.pair),
    Row("collectives {on} --see {folder}/collectives.playground"),
    Row("allreduce {on} --see {folder}/allreduce.playground", needs=FOR.pair),
    Row("sgd {on} --epochs 1 --see {folder}/sgd.playground"),
    Row("ddp {on} --epochs 1 --see {folder}/hosts.playground", environ={"PLAYGROUND_HOSTS": "2"},
    needs=FOR.pair),
    Row("ddp {on} --epochs 1 --see {folder}/ddp.playground"),
    Row("ddp {on} --epochs 1 --see {folder}/old.playground", environ=OLD),
    Row("ladder {on} --see {folder}/ladder.playground"),
    Row("pipeline {on} --see {folder}/pipeline.playground", needs=FOR.pair,
    ranks=RANKS.stages),
    Row("parameter-server {on} --see {folder}/server.playground", needs=FOR.pair),
    Row("bert {on} --see {folder}/bert.playground", needs=FOR.several_gpus),
    Row("data-parallel --devices {gpus} --see {folder}/replicas.playground", ranks=RANKS.one),
    Row("see {folder}/sgd.playground", ranks=RANKS.one),
    Row("see {folder}/ddp.playground", ranks=RANKS.one),
    # BERT, from one process too: a GPU for each rank.
    Row("bert {on}", ranks=RANKS.one),
    Row("bert {on}", needs=FOR.several_gpus),
    # The path.
    Row("hello {on}"),
    Row("p2p {on}", needs=FOR.pair),
    Row("p2p {on}", needs=FOR.pair, environ=OLD),
    Row("collectives {on}"),
    Row("allreduce {on}", needs=FOR.pair),
    Row("data-parallel --devices {gpus}", ranks=RANKS.one),
    Row("sgd {on} --epochs 1"),
    Row("ladder {on}"),
    Row("bench steps {on} --json", verdict=steps_verdict),
    Row("bench steps {on} --json", verdict=steps_verdict, environ=OLD),
    Row("ddp {on} --epochs 1"),
    Row("ddp {on} --epochs 1 --microbatches 4"),
    Row("torchrun --nproc-per-node {ranks} -m playground ddp --backend nccl --epochs 1"),
    Row("memory {on}"),
    Row("bytes --backend nccl -n 2", needs=FOR.pair),
    Row("scaling {on}", needs=FOR.pair),
    Row("gpt {on}"),
    Row("zero {on} --steps 5"),
    Row("failures --backend nccl -n 2", needs=FOR.pair),
    Row("prove {on}"),
    Row("rpc {on}", needs=FOR.pair),
    Row("parameter-server {on}", needs=FOR.pair),
    Row("bench {on} --collective all --limit -e 64M --json", verdict=bench_verdict),
    Row("bench {on} --algorithm all -e 4M --json", verdict=bench_verdict, needs=FOR.pair),
    # More ranks than GPUs.
    Row("hello {on}", needs=FOR.shares_with_four, ranks=RANKS.four),
    Row("collectives {on}", needs=FOR.shares_with_four, ranks=RANKS.four),
    Row("hello {on}", needs=FOR.cannot_share, ranks=RANKS.one_too_many, verdict=refused, code=2),
    # Failures, signals, and what is certain of results: with a deadline of their own.
    Row("pytest -m gpu", needs=FOR.real, limit=900),
)  # fmt: skip


def carry_out(row: Row, machine: Machine, folder: Path) -> tuple[bool, str]:
    """Whether the row ended as it should, and how it stands in the table."""
    started = time.perf_counter()
    command, limit = row.command(machine, folder), row.limit * (5 if is_simulated() else 1)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit,
            env={"PLAYGROUND_DATA_DIR": str(folder), **os.environ, **row.environ},
            check=False,
        )
        code, out, err = str(done.returncode), done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        said = [
            text.decode(errors="replace") if isinstance(text, bytes) else text or ""
            for text in (late.stdout, late.stderr)
        ]
        code, out, err = "none", said[0], f"{said[1]}\nnot done after {limit:g} s"
    seconds, is_fine = time.perf_counter() - started, code == str(row.code)
    if not is_fine:
        sys.stderr.write(f"{shlex.join(command)}\n{out[-4000:]}\n{err[-8000:]}\n")
    verdict = row.verdict(out or err) if is_fine else last_line(err or out)
    took = f"{seconds:.1f}"
    if is_simulated():
        verdict, took = ("as it should be" if is_fine else verdict), "-"
    return (
        is_fine,
        f"| `{row.name}` | {row.ranks(machine)} | {took} | {code} | {verdict.replace('|', '/')} |",
    )


def is_simulated() -> bool:
    return GPUS in os.environ


def carry_out_all(rows: Sequence[Row], machine: Machine) -> bool:
    """Carry out the rows, and print each. Whether all ended as they should."""
    all_fine = True
    print("| lesson | ranks | seconds | exit code | verdict |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            is_fine, line = carry_out(row, machine, Path(folder))
            print(line, flush=True)
            all_fine &= is_fine
    return all_fine


def find_machine(ranks: int | None) -> Machine:
    """This machine, for so many ranks, or as many as suit it. Raises `UsageError` if it cannot have
    them."""
    nccl = BACKENDS["nccl"]
    nccl.check(ranks or 1)
    gpus, shares = torch.cuda.device_count(), nccl_version() >= SHARES_A_GPU
    return Machine(gpus=gpus, ranks=ranks or (2 if gpus == 1 and shares else gpus), shares=shares)


def describe(machine: Machine) -> str:
    """The hardware, and the versions of what drives it."""
    names = sorted({torch.cuda.get_device_name(number) for number in range(machine.gpus)})
    return (
        f"{machine.gpus} x {', '.join(names)}, {machine.ranks} ranks; driver {driver_version()}, "
        "torch "
        f"{torch.__version__}, CUDA {torch.version.cuda}, NCCL {format_version(nccl_version())}, "
        "Python "
        f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", nargs="?", type=int, help="number of ranks")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        machine = find_machine(asked.ranks)
    except UsageError as why:
        print(f"no GPU tier here: {why}", file=sys.stderr)
        return why.exit_code
    note = f"{SIMULATED}\n" * is_simulated()
    print(f"{note}\n{describe(machine)}\n")
    is_fine = carry_out_all([row for row in ROWS if row.needs(machine)], machine)
    print(note)
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
