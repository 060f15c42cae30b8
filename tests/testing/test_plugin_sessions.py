"""The plugin in a session of pytest: what it costs those who do not use it, what ranks print,
several workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import session_ends

from playground.testing import World


def print_and_meet(rank: int, size: int) -> None:
    print(f"rank {rank} of {size}")
    print(f"warning of {rank}", file=sys.stderr)
    dist.barrier()


@pytest.fixture
def pair(world: Callable[..., World]) -> World:
    return world(2)


PRINTED = ["rank 0 of 2", "rank 1 of 2"], ["warning of 0", "warning of 1"]


@pytest.mark.parametrize("fixture", ["capsys", "capfd"])
def test_what_ranks_print_is_captured(
    fixture: str, pair: World, request: pytest.FixtureRequest
) -> None:
    captured = request.getfixturevalue(fixture)
    pair.run(print_and_meet)
    out, err = captured.readouterr()
    assert (sorted(out.splitlines()), sorted(err.splitlines())) == PRINTED


def test_the_plugin_is_not_felt_where_no_rank_is_started() -> None:
    """pytest loads it in every run, in whatever project."""
    text = (
        "import sys, pytest; before = set(sys.modules); import playground.testing; "
        "print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "playground.testing" in imported
    assert not imported & {
        "torch",
        "multiprocessing",
        "rich",
        "click",
        "socket",
        "playground.world",
    }


PARALLEL = """
import os
import pytest

def announce(rank, size):
    print("one of", size)
    assert size != 3
    return rank

def exit_at_once(rank, size):
    os._exit(7)

@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_announce(world, size, capfd):
    assert world(size).run(announce) == [*range(size)]
    assert capfd.readouterr().out == f"one of {size}\\n" * size

def test_exit(world):
    world(2).run(exit_at_once)
"""


@pytest.mark.stress
def test_workers_of_xdist_have_ranks_of_their_own(tmp_path: Path) -> None:
    """Each has its fork server, and nothing of it is left behind."""
    pytest.importorskip("xdist")
    (tmp_path / "test_parallel.py").write_text(PARALLEL)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        output, _ = process.communicate()
    assert "2 failed, 3 passed" in output
    assert "of 3 failed: AssertionError: assert 3 != 3" in output
    assert "of 2 exited with code 7" in output
    assert "/playground/world/" not in output
    assert session_ends(process.pid)
