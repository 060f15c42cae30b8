"""The benchmark: its figures are what it says they are, it finds what is wrong, and it can be interrupted."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_ranks
import pytest
from hypothesis import given, strategies as st

from playground.algorithms import ALGORITHMS, OURS
from playground.measurement.environment import Environment
from playground.runtime import UsageError, launch
from playground.runtime.remote import Remote
from playground.tools.bench import benchmark, command, compare, sizes
from playground.tools.bench.collectives import COLLECTIVES
from playground.tools.bench.report import ReportPrinter
from playground.tools.bench.results import BenchStart, SizeResult
from playground.tools.bench.settings import DEFAULT_ALGORITHMS, BenchSettings, available_algorithms

Run = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[str]"]
QUICK = ("--iterations", 2, "--warmup", 0, "-f", 64)
SETTINGS = BenchSettings(algorithms=("backend", "ring"), sizes=(64,), iterations=1, warmup=0, seed=1)
WRONG_RING = Remote("bench_ranks", "run_with_a_wrong_ring")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2, ("--collective", "all", "-b", "48K", "-e", "48K")),
        (3, ("--collective", "all", "--algorithm", "all", "-b", 16, "-e", "1K")),
        (2, ("--dtype", "bfloat16", "--op", "avg", "--algorithm", "ring,auto", "-b", "64K", "-e", "64K")),
        (3, ("--dtype", "int8", "--op", "prod", "--algorithm", "all", "-b", 64, "-e", 64)),
        # Not reduce_scatter: that of torch 2.6's gloo always adds, as this very column says there.
        (3, ("--dtype", "uint8", "--op", "bxor", "--collective", "all_reduce,reduce", "-b", 64, "-e", 64)),
    ],
    ids=str,
)
def test_everything_is_right_and_figures_are_as_defined(size: int, words: tuple[Any, ...], run_cli: Run) -> None:
    shown = run_cli("bench", "-n", size, *QUICK, *words, "--json")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    assert document["complete"]
    assert document["rows"]
    for row in document["rows"]:
        spec = COLLECTIVES[row["collective"]]
        element = {"float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1}[row["type"]]
        assert row["wrong"] == 0
        assert row["size"] == row["count"] * element * (1 if spec.in_place else size)
        assert row["redop"] == (document["settings"]["op"] if spec.reduces else "none")
        assert row["root"] == spec.root
        assert len(row["times_us"]) == 2
        assert row["time_us"] == row["p50_us"] == pytest.approx(statistics.median(row["times_us"]))
        assert row["p50_us"] <= row["p95_us"] <= row["p99_us"] <= max(row["times_us"])
        assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1000)
        assert row["busbw"] == pytest.approx(row["algbw"] * spec.factor(size))


def test_factors_are_those_of_nccl_tests() -> None:
    assert [COLLECTIVES["all_reduce"].factor(size) for size in (1, 2, 4)] == [0, 1, 1.5]
    assert [COLLECTIVES["broadcast"].factor(size) for size in (2, 4)] == [1, 1]
    assert [COLLECTIVES["all_gather"].factor(size) for size in (2, 4)] == [0.5, 0.75]


def test_all_means_every_algorithm_that_a_collective_has(run_cli: Run) -> None:
    shown = run_cli("bench", *QUICK, "--collective", "all", "--algorithm", "all", "-b", 64, "-e", 64, "--json")
    found: dict[str, list[str]] = {}
    for row in json.loads(shown.out)["rows"]:
        found.setdefault(row["collective"], []).append(row["algorithm"])
    assert found == {collective: list(available_algorithms(collective)) for collective in COLLECTIVES}
    assert found["all_reduce"] == ["backend", *ALGORITHMS]
    assert {collective for collective, names in found.items() if len(names) > 1} == set(OURS)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_is_measured_by_default(collective: str) -> None:
    settings = BenchSettings(collectives=(collective,), sizes=(64,))
    assert settings.algorithms_of(collective) == (
        ("backend", "ring", "auto") if collective == "all_reduce" else ("backend",)
    )


def test_our_defaults_are_algorithms_of_ours() -> None:
    for collective, names in DEFAULT_ALGORITHMS.items():
        assert set(names) <= set(available_algorithms(collective))


@pytest.mark.parametrize("op", ["sum", "max", "avg"])
def test_our_reduce_scatter_and_all_gather_are_right(op: str, run_cli: Run) -> None:
    words = ("--collective", "reduce_scatter,all_gather", "--algorithm", "ring", "--op", op, "-b", 60, "-e", "64K")
    document = json.loads(run_cli("bench", "-n", 3, *QUICK, *words, "--json").out)
    assert [(row["collective"], row["algorithm"], row["wrong"]) for row in document["rows"][::2]] == [
        ("all_gather", "ring", 0), ("reduce_scatter", "ring", 0),
    ]  # fmt: skip
    assert [row["wrong"] for row in document["rows"]] == [0] * 4
    assert document["settings"]["algorithms"] == ["ring"]


def test_a_wrong_algorithm_is_found() -> None:
    assert count_wrong(SETTINGS) == {"backend": 0, "ring": 2}


def test_a_wrong_all_gather_or_reduce_scatter_of_ours_is_found() -> None:
    assert count_wrong(replace(SETTINGS, collectives=("all_gather",))) == {"backend": 0, "ring": 2}
    wrong = count_wrong(replace(SETTINGS, collectives=("reduce_scatter",)))
    assert wrong["backend"] == 0
    assert 0 < wrong["ring"] <= 16


def count_wrong(settings: BenchSettings) -> dict[str, int]:
    """Wrong elements by algorithm, where our ring is broken."""
    measured = last_report(bench_ranks.run_with_a_wrong_ring, settings)["measured"]
    return {row.algorithm: row.wrong for row in measured.rows}


def test_ranks_report_where_they_measure_and_then_each_size() -> None:
    events = reports(benchmark.run, replace(SETTINGS, sizes=(64, 128), limit=True))
    [start, *sizes] = [value for event in events for value in event.values() if value is not True]
    assert isinstance(start, BenchStart)
    assert isinstance(start.environment, Environment)
    assert start.environment.cores >= 1
    assert [type(size) for size in sizes] == [SizeResult, SizeResult]
    assert [size.wire.size for size in sizes] == [64, 128]


def test_results_are_read_without_importing_torch(torch_is_imported: Callable[..., bool]) -> None:
    assert not torch_is_imported("playground.tools.bench.command", "playground.tools.bench.results")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"collectives": ("barrier",)}, "collective 'barrier' is unknown"),
        ({"algorithms": ("rung",)}, "algorithm 'rung' is unknown"),
        ({"dtype": "float8"}, "dtype 'float8' is unknown"),
        ({"op": "mean"}, "op 'mean' is unknown"),
        ({"sizes": ()}, "give at least one"),
        ({"sizes": (128, 64)}, "from small to large"),
        ({"sizes": (6,)}, "not a multiple of 4"),
        ({"iterations": 0}, "0 iterations"),
        ({"warmup": -1}, "-1 warm-up calls"),
        ({"collectives": ("gather",)}, "--algorithm ring for gather: ours are algorithms for all_reduce"),
    ],
    ids=str,
)
def test_settings_check_themselves(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(SETTINGS, **values)


def test_wrong_results_make_exit_code_1(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RUN", WRONG_RING)
    shown = run_cli("bench", *QUICK, "-b", 64, "-e", 64)
    assert shown.code == 1
    assert shown.err == "playground: 2 elements of the results are wrong: see the column #wrong\n"


def test_known_data_is_exact_in_every_type() -> None:
    assert launch(bench_ranks.data_is_exact, 1) == [[]]


def test_what_the_backend_refuses_is_impossible() -> None:
    settings = BenchSettings(collectives=("broadcast",), sizes=(64,))
    with pytest.raises(UsageError, match="gloo cannot do broadcast of float32 by backend"):
        reports(bench_ranks.run_with_a_backend_that_refuses, settings)


def test_ranks_that_were_asked_for_different_things_say_so() -> None:
    with pytest.raises(UsageError, match=r"sizes is .* on rank 0 and .* on rank 1"):
        reports(bench_ranks.run_with_different_settings, SETTINGS, replace(SETTINGS, sizes=(128,)))


def reports(fn: Callable[..., None], *settings: BenchSettings) -> list[dict[str, Any]]:
    """What rank 0 of two reported."""
    events: list[dict[str, Any]] = []
    launch(fn, 2, args=settings, on_report=lambda rank, event: events.append(event) if rank == 0 else None)
    return events


def last_report(fn: Callable[..., None], *settings: BenchSettings) -> dict[str, Any]:
    return reports(fn, *settings)[-1]


def test_text_csv_and_plot(run_cli: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ("--limit", "--csv", tmp_path / "rows.csv", "--plot", tmp_path / "plot.svg")
    shown = run_cli("bench", *QUICK, "-b", 64, "-e", "4K", *words)
    assert (shown.code, shown.err) == (0, "")
    assert (tmp_path / "plot.svg").read_text().rstrip().endswith("</svg>")
    lines = shown.out.splitlines()
    assert lines[0].startswith("# bench: gloo on cpu, 2 ranks")
    [titles] = [line for line in lines if "busbw" in line and line.endswith("%limit")]
    assert "#wrong" in titles
    assert len([line for line in lines if line.startswith("  all_reduce")]) == 6
    assert [line.split(":")[0] for line in lines[-3:]] == [
        f"# Avg bus bandwidth, all_reduce by {algorithm}" for algorithm in ("backend", "ring", "auto")
    ]
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["algorithm"], row["size"], row["wrong"]) for row in rows[:3]] == [
        (algorithm, "64", "0") for algorithm in ("backend", "ring", "auto")
    ]
    assert all(float(row["limit_percent"]) > 0 for row in rows)


def test_json_with_the_limit(run_cli: Run) -> None:
    document = json.loads(run_cli("bench", "-n", 3, *QUICK, "-b", 64, "-e", "4K", "--limit", "--json").out)
    assert document["limit"]["what"].startswith("TCP on loopback")
    wire = {row["size"]: row["busbw"] for row in document["limit"]["rows"]}
    assert wire.keys() == {64, 4096}
    for row in document["rows"]:
        assert row["limit_percent"] == pytest.approx(100 * row["busbw"] / wire[row["size"]])
    of_ring = [row["busbw"] for row in document["rows"] if row["algorithm"] == "ring"]
    assert document["average_busbw"]["all_reduce"]["ring"] == pytest.approx(statistics.mean(of_ring))
    assert document["environment"].keys() >= {"hardware", "cores", "os", "python", "torch", "nccl"}
    assert (document["lesson"], document["world_size"], document["steps"]) == ("bench", 3, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--algorithm", "rung"), "'rung' is none of"),
        (("--collective", "barrier"), "'barrier' is none of"),
        (("--collective", ""), "'' is none of"),
        (("--dtype", "float8"), "float8"),
        (("--op", "mean"), "mean"),
        (("--op", "band"), "BAND is defined for integers"),
        (("--op", "avg", "--dtype", "int32", "--algorithm", "backend"), "AVG is defined for floating point"),
        (("--collective", "broadcast", "--algorithm", "ring"), "--algorithm ring for broadcast"),
        (("--collective", "all", "--algorithm", "ring"), "--algorithm ring for broadcast"),
        (("--collective", "all_gather", "--algorithm", "auto"), "--algorithm auto for all_gather"),
        (("-b", "2K", "-e", "1K"), "--begin 2K is beyond --end 1K"),
        (("-b", "6"), "not a multiple of 4"),
        (("-b", "4", "--collective", "all_gather"), "at least 8 bytes"),
        (("-b", "0"), "is no size"),
        (("-e", "1.5M"), "is no size"),
        (("-f", "1"), "--factor"),
        (("--iterations", "0"), "--iterations"),
        (("--warmup", "-1"), "--warmup"),
        (("-e", "900000G"), "bytes of memory"),
        (("--limit", "-n", "1"), "a wire has two ends"),
        (("--plot", "plot.pdf"), ".svg or .png"),
        (("--plot", "/nowhere/plot.svg"), "no such folder"),
        (("--csv", "/nowhere/rows.csv"), "no such folder"),
        (("--csv", "/", *QUICK, "-e", "1K"), "cannot be written"),
        (("--diff", __file__, __file__), "not a result"),
        (("--diff", "/nowhere.json", __file__), "No such file"),
    ],
    ids=str,
)
def test_bad_input_gets_one_line_and_exit_code_2(words: tuple[Any, ...], message: str, run_cli: Run) -> None:
    shown = run_cli("bench", *words)
    assert (shown.code, shown.err.count("\n")) == (2, 1), shown
    assert message in shown.err


def test_without_matplotlib_it_says_how_to_get_it(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = run_cli("bench", "--plot", "plot.svg")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err == "playground: --plot needs matplotlib: pip install 'playground[plot]'\n"


def test_ctrl_c_prints_what_there_is(start_cli: Start) -> None:
    process = start_cli("bench", "-b", "64", "-e", "64M", "--iterations", 3)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("  all_reduce"):
            break
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, err.strip()) == (130, "playground: interrupted")
    assert out.splitlines()[-1].startswith("# Avg bus bandwidth")


class InterruptedPrinter(ReportPrinter):
    def __call__(self, rank: int, event: Mapping[str, object]) -> None:
        super().__call__(rank, event)
        if self.rows:
            raise KeyboardInterrupt


def test_json_of_an_interrupted_run_parses(run_cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "ReportPrinter", InterruptedPrinter)
    files = ("--csv", tmp_path / "rows.csv", "--plot", tmp_path / "plot.png")
    shown = run_cli("bench", *QUICK, "-b", 64, "-e", "64K", "--json", *files)
    document = json.loads(shown.out)
    assert shown.code == 130
    assert not document["complete"]
    assert {row["size"] for row in document["rows"]} == {64}
    assert document["average_busbw"]["all_reduce"].keys() == {"backend", "ring", "auto"}
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 4
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def result(times: dict[str, list[float]], **settings: Any) -> dict[str, Any]:
    """A result as --json has it, as far as a comparison reads it."""
    rows = [
        {"collective": "all_reduce", "algorithm": name, "size": 64, "times_us": each} for name, each in times.items()
    ]
    return {
        "lesson": "bench", "backend": "gloo", "device": "cpu", "world_size": 2, "environment": None, "rows": rows,
        "settings": {"collectives": ["all_reduce"], "dtype": "float32", "op": "sum", **settings},
    }  # fmt: skip


STEADY = [100.0, 101.0, 99.0, 102.0, 98.0, 100.0]


def test_diff_tells_a_change_from_noise(run_cli: Run, tmp_path: Path) -> None:
    noisy = [60.0, 150.0, 80.0, 210.0, 95.0, 120.0]
    before = {"ring": STEADY, "auto": STEADY, "backend": STEADY, "binary-tree": STEADY[:3], "all-to-all": STEADY}
    after = {"ring": [time / 2 for time in STEADY], "auto": [time * 2 for time in STEADY], "backend": noisy}
    for name, times in (("before", before), ("after", after | {"binary-tree": STEADY})):
        (tmp_path / f"{name}.json").write_text(json.dumps(result(times)))
    words = ("bench", "--diff", tmp_path / "before.json", tmp_path / "after.json")
    rows = json.loads(run_cli(*words, "--json").out)["rows"]
    assert {row["algorithm"]: row["verdict"] for row in rows} == {
        "ring": "faster", "auto": "slower", "backend": "no difference", "binary-tree": "too few trials",
    }  # fmt: skip
    assert [row["ratio"] for row in rows][:2] == [0.5, 2.0]
    shown = run_cli(*words)
    assert shown.code == 0
    assert [line.split("  ")[-1] for line in shown.out.splitlines()[2:4]] == ["faster", "slower"]


@pytest.mark.parametrize("times", [[], [0.0], ["x"], None])
def test_a_result_without_times_is_none(times: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text(json.dumps(result({"ring": times})))
    with pytest.raises(UsageError, match="not a result"):
        compare.load(tmp_path / "empty.json")


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (result({"ring": STEADY}, dtype="int8"), "dtype is float32 in one and int8 in the other"),
        (result({"ring": STEADY}, collectives=["reduce"]), "collectives is all_reduce in one and reduce"),
        ({**result({"ring": STEADY}), "world_size": 3}, "world_size is 2 in one and 3"),
        (result({"auto": STEADY}), "no algorithm was measured at the same size"),
    ],
)
def test_results_of_different_benchmarks_are_not_compared(other: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=field):
        compare.compare(compare.parse(result({"ring": STEADY})), compare.parse(other))


def test_a_run_can_be_compared_with_itself(run_cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(run_cli("bench", "-b", 64, "-e", 64, "--iterations", 6, "--json").out)
    shown = run_cli("bench", "--diff", file, file)
    assert shown.code == 0
    assert shown.out.count("no difference") == 3


def test_results_of_different_machines_say_where_they_come_from(run_cli: Run, tmp_path: Path) -> None:
    host = {
        "hardware": "abacus", "cores": 2, "memory": 2**34, "gpus": [], "os": "Linux", "python": "3.11", "torch": "2.6",
        "cuda": None, "nccl": None,
    }  # fmt: skip
    for name, environment in (("before", host), ("after", host | {"hardware": "slide rule", "driver": None})):
        (tmp_path / f"{name}.json").write_text(json.dumps({**result({"ring": STEADY}), "environment": environment}))
    shown = run_cli("bench", "--diff", tmp_path / "before.json", tmp_path / "after.json")
    assert shown.out.splitlines()[:2] == [
        "# before: abacus, 2 cores, 16 GiB, Linux, python 3.11, torch 2.6",
        "# after: slide rule, 2 cores, 16 GiB, Linux, python 3.11, torch 2.6",
    ]


@given(st.integers(1, 2**50))
def test_a_size_that_is_written_is_read(size: int) -> None:
    assert sizes.parse(sizes.to_text(size)) == size


@given(st.integers(1, 10**6), st.sampled_from("KMG"))
def test_units_are_powers_of_1024(number: int, unit: str) -> None:
    assert sizes.parse(f"{number}{unit}") == sizes.parse(f"{number}{unit.lower()}")
    assert sizes.parse(f"{number}{unit}") == number * 1024 ** (1 + "KMG".index(unit))


@given(st.text(max_size=5).filter(lambda text: not text.strip()[:1].isdigit()))
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        sizes.parse(text)


@given(st.integers(1, 1000), st.integers(1, 10**9), st.integers(2, 10))
def test_sizes_grow_by_the_factor_up_to_the_end(begin: int, end: int, factor: int) -> None:
    row = sizes.geometric_range(begin, end, factor)
    assert (row[0] == begin) if row else end < begin
    assert all(larger == factor * smaller for smaller, larger in itertools.pairwise(row))
    assert not row or row[-1] <= end < row[-1] * factor
