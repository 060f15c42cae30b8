"""coverage.py counts the lines that ranks run: also of ranks that are kept, and of those that fail."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from playground.runtime import RankFailed
from playground.runtime.rank.coverage import count_lines, read_settings
from playground.testing import World

coverage = pytest.importorskip("coverage", minversion="7.10")
pytest_plugins = ["pytester"]


def return_rank_name(rank: int, size: int) -> str:
    if rank == 0:
        return "first"
    return "another"


def fail_on_rank_1(rank: int, size: int) -> None:
    if rank == 1:
        raise LookupError("counted")


def counted_lines(folder: Path, run: Callable[[], object], branch: bool = False) -> set[int]:
    """The lines of this module that `run` runs, here and in ranks."""
    counting = coverage.Coverage(
        data_file=str(folder / "data"), config_file=False, include=[__file__], branch=branch, messages=False
    )
    counting.start()
    try:
        run()
    finally:
        counting.stop()
        counting.save()
    counting.combine([str(folder)])
    return set(counting.get_data().lines(__file__) or ())


def lines_of(fn: Callable[..., object]) -> set[int]:
    """The lines of a function's body."""
    lines, first = inspect.getsourcelines(fn)
    return set(range(first + 1, first + len(lines)))


def pid(rank: int, size: int) -> int:
    return os.getpid()


@pytest.mark.parametrize("branch", [False, True])
def test_the_lines_of_all_ranks_are_counted(branch: bool, world: Callable[..., World], tmp_path: Path) -> None:
    pids = world(2).run(pid)
    counted = counted_lines(tmp_path, lambda: world(2).run(return_rank_name), branch)
    assert counted >= lines_of(return_rank_name)
    assert world(2).run(pid) == pids, "the ranks are kept all the same"


def test_the_lines_of_a_rank_that_fails_are_counted(world: Callable[..., World], tmp_path: Path) -> None:
    def run() -> None:
        with pytest.raises(RankFailed, match="counted"):
            world(2).run(fail_on_rank_1)

    assert counted_lines(tmp_path, run) >= lines_of(fail_on_rank_1)


def test_who_counts_already_goes_on(tmp_path: Path) -> None:
    def run() -> None:
        with count_lines(read_settings()):
            assert return_rank_name(0, 2) == "first"
        assert [file.name for file in tmp_path.iterdir()] == ["data"]
        assert return_rank_name(1, 2) == "another"

    assert counted_lines(tmp_path, run) >= lines_of(return_rank_name)


@pytest.mark.stress
def test_pytest_cov_puts_them_together(pytester: pytest.Pytester) -> None:
    pytest.importorskip("pytest_cov")
    module = pytester.makepyfile(
        test_counted="""
        def say_who(rank, size):
            if rank == 1:
                return "second"
            return "first"

        def test_ranks(world):
            assert world(2).run(say_who) == ["first", "second"]
        """
    )
    result = pytester.runpytest_subprocess("-q", f"--cov={module.stem}", "--cov-report=term-missing")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_counted.py * 0 * 100%*"])
