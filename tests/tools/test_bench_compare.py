"""bench --diff: what counts as a change between two results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import Run
from widths import too_wide

from playground.tools.bench import results
from playground.world import UsageError


def result(times: dict[str, list[float]], **settings: Any) -> dict[str, Any]:
    """A result as --json has it, as far as a comparison reads it."""
    rows = [
        {"collective": "all_reduce", "algorithm": name, "size": 64, "times_us": each}
        for name, each in times.items()
    ]
    return {
        "lesson": "bench", "backend": "gloo", "device": "cpu", "world_size": 2, "environment": None,
        "rows": rows,
        "settings": {"collectives": ["all_reduce"], "dtype": "float32", "op": "sum", **settings},
    }  # fmt: skip


STEADY = [100.0, 101.0, 99.0, 102.0, 98.0, 100.0]


def test_diff_tells_a_change_from_noise(run_cli: Run, tmp_path: Path) -> None:
    noisy = [60.0, 150.0, 80.0, 210.0, 95.0, 120.0]
    before = {
        "ring": STEADY,
        "auto": STEADY,
        "backend": STEADY,
        "binary-tree": STEADY[:3],
        "all-to-all": STEADY,
    }
    after = {
        "ring": [time / 2 for time in STEADY],
        "auto": [time * 2 for time in STEADY],
        "backend": noisy,
    }
    for name, times in (("before", before), ("after", after | {"binary-tree": STEADY})):
        (tmp_path / f"{name}.json").write_text(json.dumps(result(times)))
    words = ("bench", "--diff", tmp_path / "before.json", tmp_path / "after.json")
    rows = json.loads(run_cli(*words, "--json").out)["rows"]
    assert {row["algorithm"]: row["verdict"] for row in rows} == {
        "ring": "faster", "auto": "slower", "backend": "no difference",
        "binary-tree": "too few trials",
    }  # fmt: skip
    assert [row["ratio"] for row in rows][:2] == [0.5, 2.0]
    shown = run_cli(*words)
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert too_wide("\n".join(lines)) == []
    rows = {line.split()[0]: line.split("  ")[-1] for line in lines if line.split()[1:2] == ["64"]}
    assert [rows[name] for name in ("ring", "auto", "backend")] == [
        "faster",
        "slower",
        "no difference",
    ]
    assert lines[-1] == "Compared: 4 rows: 1 faster, 1 slower, 1 no difference, 1 too few trials."
    assert "98.1 to 101.9" in run_cli(*words, "--wide").out


@pytest.mark.parametrize("times", [[], [0.0], ["x"], None])
def test_a_result_without_times_is_none(times: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text(json.dumps(result({"ring": times})))
    with pytest.raises(UsageError, match="not a result"):
        results.load(tmp_path / "empty.json")


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (result({"ring": STEADY}, dtype="int8"), "dtype is float32 in one and int8 in the other"),
        ({**result({"ring": STEADY}), "world_size": 3}, "world_size is 2 in one and 3"),
        (result({"auto": STEADY}), "no algorithm was measured at the same size"),
    ],
)
def test_results_of_different_benchmarks_are_not_compared(
    other: dict[str, Any], field: str
) -> None:
    with pytest.raises(UsageError, match=field):
        results.compare(results.parse_result(result({"ring": STEADY})), results.parse_result(other))


def test_one_interrupted_trial_does_not_hide_a_difference() -> None:
    key, slower = ("all_reduce", "ring", 64), [2 * time for time in STEADY * 4]
    assert results.compare_rows(key, [*STEADY * 4, 150.0], slower).verdict == "slower"
    assert results.compare_rows(key, STEADY * 4, [*slower, 60.0]).verdict == "slower"
    assert results.compare_rows(key, STEADY * 4, [99.0, *slower, 60.0]).verdict == "no difference"


def test_a_run_that_meets_a_busy_moment_is_no_different() -> None:
    """A quarter of the trials, those of one pass, took three times as long."""
    busy = [time if number % 4 else 3 * time for number, time in enumerate(STEADY * 4)]
    key = ("all_reduce", "ring", 64)
    assert results.compare_rows(key, STEADY * 4, busy).verdict == "no difference"
    assert results.compare_rows(key, busy, STEADY * 4).verdict == "no difference"
