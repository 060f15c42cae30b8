"""The benchmark: its figures are what it says they are, and it finds what is wrong."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Run
from widths import too_wide

from playground.algorithms import load_algorithm
from playground.base.remote import Remote
from playground.tools.bench import benchmark, page
from playground.tools.bench.benchmark import all_gather_single, reduce_scatter_single
from playground.tools.bench.settings import COLLECTIVES, BenchSettings, available_algorithms
from playground.world import UsageError, launch

QUICK = ("--iterations", 2)
SETTINGS = BenchSettings(
    algorithms=("backend", "ring"),
    sizes=(64,),
    iterations=1,
)


def forgetful_all_reduce(tensor: torch.Tensor, op: Any) -> None:
    """An all-reduce that leaves the last element as it was."""
    last = tensor[-1].clone()
    dist.all_reduce(tensor, op=op)
    tensor[-1] = last


def forgetful_all_gather(output: torch.Tensor, input: torch.Tensor) -> None:
    """An all-gather that leaves the last element as it was."""
    last = output[-1].clone()
    all_gather_single(output, input)
    output[-1] = last


def shifted_reduce_scatter(output: torch.Tensor, input: torch.Tensor, op: Any) -> None:
    """A reduce-scatter in which each rank gets what is its neighbour's."""
    reduce_scatter_single(output, input.roll(output.numel()), op=op)


WRONG: dict[str, Any] = {
    "all_reduce": forgetful_all_reduce,
    "all_gather": forgetful_all_gather,
    "reduce_scatter": shifted_reduce_scatter,
}


def wrong_ring(collective: str, name: str) -> Any:
    """Instead of `load_algorithm`: what it loads, but a broken ring."""
    return WRONG[collective] if name == "ring" else load_algorithm(collective, name)


def run_with_a_wrong_ring(rank: int, size: int, settings: BenchSettings) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "load_algorithm", wrong_ring)
        benchmark.run(rank, size, settings)


WRONG_RING = Remote("test_bench", "run_with_a_wrong_ring")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (3, ("--collective", "all", "--algorithm", "all", "-b", 16, "-e", 64)),
        (2, ("--dtype", "bfloat16", "--algorithm", "ring,auto", "-b", "64K", "-e", "64K")),
        (3, ("--dtype", "int8", "--op", "prod", "-b", "48K", "-e", "48K")),
    ],
    ids=str,
)
def test_everything_is_right_and_figures_are_as_defined(
    size: int, words: tuple[Any, ...], run_cli: Run
) -> None:
    shown = run_cli("bench", "-n", size, *QUICK, *words, "--json")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    assert document["rows"]
    for row in document["rows"]:
        spec = COLLECTIVES[row["collective"]]
        element = {"float32": 4, "bfloat16": 2, "int8": 1}[row["type"]]
        assert row["wrong"] == 0
        assert row["size"] == row["count"] * element * (1 if spec.in_place else size)
        assert row["redop"] == (document["settings"]["op"] if spec.reduces else "none")
        assert row["root"] == spec.root
        assert len(row["times_us"]) == row["trials"] == 2
        assert len(row["rank_us"]) == size
        assert 0 <= row["slowest_rank"] < size
        assert row["slowest_percent"] in (50, 100)
        assert row["time_us"] == row["p50_us"] == pytest.approx(statistics.median(row["times_us"]))
        assert row["p50_us"] <= row["p95_us"] <= row["p99_us"] <= max(row["times_us"])
        assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1000)
        assert row["busbw"] == pytest.approx(row["algbw"] * spec.factor(size))
    if words[1::2][:2] == ("all", "all"):
        assert {(row["collective"], row["algorithm"]) for row in document["rows"]} == {
            (collective, name)
            for collective in COLLECTIVES
            for name in available_algorithms(collective)
        }


def test_factors_are_those_of_nccl_tests() -> None:
    factors = {name: [COLLECTIVES[name].factor(size) for size in (2, 4)] for name in COLLECTIVES}
    assert factors.pop("all_reduce") == [1, 1.5]
    assert factors.pop("broadcast") == factors.pop("reduce") == [1, 1]
    assert [*factors.values()] == [[0.5, 0.75]] * 5


@pytest.mark.parametrize("collective", WRONG)
def test_a_wrong_algorithm_is_found(collective: str) -> None:
    settings = replace(SETTINGS, collectives=(collective,))
    rows = reports(run_with_a_wrong_ring, settings)[-1]["measured"]
    wrong = {row.algorithm: row.wrong for row in rows}
    assert wrong["backend"] == 0
    assert wrong["ring"] == 2 or (collective == "reduce_scatter" and 0 < wrong["ring"] <= 16)


def test_ranks_report_where_they_measure_and_then_each_size() -> None:
    events = reports(benchmark.run, replace(SETTINGS, sizes=(64, 128), iterations=2, limit=True))
    [start] = [event["start"] for event in events if "start" in event]
    assert start.hardware
    assert start.cores >= 1
    assert [row.trials for event in events if "measured" in event for row in event["measured"]] == [
        2
    ] * 6
    steps = [
        (event["phase"], event["step"], event["steps"]) for event in events if "phase" in event
    ]
    assert steps[:2] == [
        ("pass 1 of 2: all_reduce, 64 B", 0, 4),
        ("pass 1 of 2: all_reduce, 128 B", 1, 4),
    ]
    assert steps[3] == ("pass 2 of 2: all_reduce, 128 B", 3, 4)


def test_results_are_read_without_importing_torch(
    torch_is_imported: Callable[..., list[str]],
) -> None:
    assert not torch_is_imported("playground.tools.bench.page", "playground.tools.bench.results")


def test_wrong_results_make_exit_code_1(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RUN", WRONG_RING)
    shown = run_cli("bench", *QUICK, "-b", 64, "-e", 64, "--algorithm", "ring")
    assert shown.code == 1, shown.err
    assert shown.err == "playground: 2 elements of the results are wrong: see the column #wrong\n"


def run_with_different_settings(rank: int, size: int, *settings: BenchSettings) -> None:
    benchmark.run(rank, size, settings[rank])


def test_ranks_that_were_asked_for_different_things_say_so() -> None:
    with pytest.raises(UsageError, match=r"sizes is .* on rank 0 and .* on rank 1"):
        reports(run_with_different_settings, SETTINGS, replace(SETTINGS, sizes=(128,)))


def reports(fn: Callable[..., None], *settings: BenchSettings) -> list[dict[str, Any]]:
    """What rank 0 of two reported."""
    events: list[dict[str, Any]] = []
    launch(
        fn,
        2,
        args=settings,
        on_report=lambda rank, event: events.append(event) if rank == 0 else None,
    )
    return events


def test_text_document_and_plot(run_cli: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ("bench", *QUICK, "-b", 64, "-e", 256, "--limit")
    document = json.loads(run_cli(*words, "--json").out)
    limits = {
        row["size"]: row["time_us"] for row in document["rows"] if row["algorithm"] == "memory"
    }
    for row in document["rows"]:
        assert row["limit_percent"] == pytest.approx(100 * limits[row["size"]] / row["time_us"])
    of_auto = [row["busbw"] for row in document["rows"] if row["algorithm"] == "auto"]
    assert document["average_busbw"]["all_reduce"]["auto"] == pytest.approx(
        statistics.mean(of_auto)
    )
    assert document["environment"].keys() >= {"hardware", "cores", "os", "python", "torch", "nccl"}
    assert (document["lesson"], document["world_size"], document["steps"]) == ("bench", 2, [])
    shown = run_cli(*words, "--plot", tmp_path / "plot.svg")
    assert (shown.code, shown.err) == (0, "")
    assert (tmp_path / "plot.svg").read_text().rstrip().endswith("</svg>")
    lines = shown.out.splitlines()
    assert too_wide("\n".join(lines)) == []
    assert lines[0].startswith("bench: gloo on cpu, 2 ranks")
    assert "all_reduce: sum of float32" in lines
    [units] = [line for line in lines if line.startswith("  algorithm")]
    assert units.split() == ["algorithm", "(B)", "(us)", "(GB/s)", "#wrong", "(rank:", "%)", "(%)"]
    rows = [line.split() for line in lines[lines.index(units) + 1 :][:6]]
    names = "backend", "auto", "memory"
    assert [row[:2] for row in rows] == [[name, size] for size in ("64", "256") for name in names]
    assert any(
        line.startswith("Average busbw (GB/s), all_reduce: backend ") for line in lines[-3:-1]
    )
    assert lines[-1] == "Measured: all_reduce from 64 B to 256 B; every result is correct."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--collective", "all_gather", "--algorithm", "auto"),
            "for all_gather: it has backend, ring",
        ),
        (("-b", "4", "--collective", "all_gather"), "at least 8 bytes"),
        (("-e", "1.5M"), "is no size"),
        (("-e", "900000G"), "bytes of memory"),
        (("--diff", __file__, __file__), "not a result"),
        (("--plot", "plot.pdf"), "a figure is a file that ends in"),
        (("--diff", "a", "b", "-n", "2"), "-n has no effect with --diff"),
    ],
    ids=str,
)
def test_bad_input_gets_one_line_and_exit_code_2(
    words: tuple[Any, ...], message: str, run_cli: Run
) -> None:
    shown = run_cli("bench", *words)
    assert (shown.code, shown.err.count("\n")) == (2, 1), shown
    assert message in shown.err


def test_without_matplotlib_it_says_how_to_get_it(
    run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = run_cli("bench", "--plot", "plot.svg")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err == "playground: --plot needs matplotlib: pip install 'playground[plot]'\n"


def test_the_memory_of_several_hosts_is_no_limit(
    run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAYGROUND_HOSTS", "2")
    shown = run_cli("bench", *QUICK, "-b", 64, "-e", 64, "--limit")
    assert (shown.code, shown.err.count("\n")) == (2, 1)
    assert "--limit on 2 hosts" in shown.err
