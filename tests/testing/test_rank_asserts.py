"""What a test writer reads when a rank fails: their own lines and values, in the test and in the
ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch  # noqa: F401  (pytester forgets what its modules import, and torch can be imported only once)

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def _as_a_person_would_run_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where pytest takes itself to be in CI it truncates nothing."""
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "FORCE_COLOR", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    before = list(sys.path)
    yield
    sys.path[:] = before


FAILING = """
import os
import pytest
import torch, torch.distributed as dist
import checks_of_mine

def everybodys_sum(rank, size):
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert int(tensor) == 5

def compare_lists(rank, size):
    if rank == 1:
        print("about to fail")
        assert [f"item {i}" for i in range(20)] == ["item"] * 20
    dist.barrier()

def call_helper(rank, size, limit):
    checks_of_mine.check_names(limit)

def main():
    assert os.environ["RANK"] == "none"

@pytest.mark.parametrize("fn", [everybodys_sum, compare_lists])
def test_function(world, fn):
    world(2).run(fn)

def test_helper(world):
    world(1).run(call_helper, 3)

def test_function_without_parameters(world):
    world(1).run(main)

def test_impossible(world):
    world(0).run(main)

def test_after_all_that(world):
    assert world(4).run(max) == [4] * 4
"""
HELPER = """
def check_names(limit):
    names = ["x", "y"]
    assert len(names) > limit
"""


@pytest.fixture
def failing(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest("import pytest; pytest.register_assert_rewrite('checks_of_mine')")
    pytester.makepyfile(checks_of_mine=HELPER)
    return pytester


def test_a_failure_is_the_users_lines_and_values(failing: pytest.Pytester) -> None:
    failing.makepyfile(test_failing=FAILING)
    result = failing.runpytest_inprocess("-v", "-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(failed=5, passed=1)
    result.stdout.fnmatch_lines(
        [
            ">       world(2).run(fn)",
            "E *RankFailed: rank [01] of 2 failed: AssertionError: assert 3 == 5",
            "E       Traceback (most recent call last):",
            'E         File "*test_failing.py", line 9, in everybodys_sum',
            "E           assert int(tensor) == 5",
            "E       AssertionError: assert 3 == 5",
            "E        +  where 3 = int(tensor([[]3.[]]))",
            "test_failing.py:*: RankFailed",
            "E *RankFailed: rank 1 of 2 failed: AssertionError: assert [[]'item 0', *",
            "E *At index 0 diff: 'item 0' != 'item'",
            "E *Full diff:*",
            "E *Full output truncated*",
            "*Captured stdout call*",
            "about to fail",
            "E *assert 2 > 3",
            "E        +  where 2 = len([[]'x', 'y'[]])",
            "E *assert '0' == 'none'",
            ">       world(0).run(main)",
            "E *UsageError: a world of 0 ranks*",
        ]
    )
    result.stdout.no_fnmatch_line("*playground?world?*.py*")
    result.stdout.no_fnmatch_line("*playground?testing?*.py*")


@pytest.mark.stress
def test_verbosity_and_debugger_of_pytest_hold(failing: pytest.Pytester) -> None:
    """-vv shows the whole difference also in ranks; --pdb opens at the line of the test."""
    failing.makepyfile(
        test_verbose=FAILING,
        debuggers="""
        import pdb
        class Reporter(pdb.Pdb):
            def interaction(self, frame, found):  # a traceback; from Python 3.13 on the exception
                stack, current = self.get_stack(frame, getattr(found, "__traceback__", found))
                print("debugging", stack[current][0].f_code.co_name)
        """,
    )
    result = failing.runpytest_inprocess(
        "-vv",
        "--tb=short",
        "--pdb",
        "--pdbcls=debuggers:Reporter",
        "-k",
        "compare_lists",
        "-p",
        "no:cacheprovider",
    )
    result.assert_outcomes(failed=1, deselected=5)
    result.stdout.fnmatch_lines(
        [
            "test_verbose.py:*: in test_function",
            "    world(2).run(fn)",
            "E *RankFailed: rank 1 of 2 failed: AssertionError: assert [[]'item 0', *'item 19'[]] "
            "== *",
            "E *Full diff:*",
            "E     +     'item 19',",
            "debugging test_function",
        ]
    )


def test_plain_asserts_stay_plain_and_one_line_is_one_line(failing: pytest.Pytester) -> None:
    failing.makepyfile(test_plain=FAILING)
    result = failing.runpytest_inprocess(
        "--assert=plain", "--tb=line", "-k", "everybodys_sum", "-p", "no:cacheprovider"
    )
    result.assert_outcomes(failed=1, deselected=5)
    result.stdout.fnmatch_lines(
        ["*test_plain.py:*: *RankFailed: rank [01] of 2 failed: AssertionError"]
    )
    result.stdout.no_fnmatch_line("*assert 3 == 5*")
    result.stdout.no_fnmatch_line("*playground?world?*.py*")


def test_modules_that_only_pytest_finds(pytester: pytest.Pytester) -> None:
    """With --import-mode=importlib the folder of a test module is not in sys.path."""
    folder = pytester.mkdir("unit")
    (folder / "test_found.py").write_text(
        "def compare(rank, size, least):\n    assert rank > least\n    return least\n\n"
        "def test_compare(world):\n    world(1).run(compare, 7)\n\n"
        "def test_results_arrive(world):\n    assert world(2).run(compare, -1) == [-1, -1]\n"
    )
    result = pytester.runpytest_inprocess("--import-mode=importlib", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["E *AssertionError: assert 0 > 7"])
