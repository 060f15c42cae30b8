"""coverage.py counts the lines that ranks run."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


@pytest.mark.stress
def test_the_lines_of_all_ranks_are_counted(pytester: pytest.Pytester) -> None:
    pytest.importorskip("pytest_cov")
    (pytester.path / ".coveragerc").write_text("[run]\npatch = subprocess, fork, _exit\n")
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
    result = pytester.runpytest_subprocess(
        "-q", f"--cov={module.stem}", "--cov-report=term-missing"
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_counted.py * 0 * 100%*"])
