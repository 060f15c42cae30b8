"""Worlds that somebody else started: torchrun, and variables set by hand."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import ENOUGH, by_hand, free_port, is_first_epoch
from programs import ForkedProgram

from playground.lessons import LESSONS
from playground.runtime.rank.steps import run_steps
from playground.testing import World

Worlds = Callable[..., World]
Start = Callable[..., "subprocess.Popen[str]"]
Fork = Callable[..., ForkedProgram]


def test_torchrun_gives_what_our_own_launcher_gives(world: Worlds, fork_program: Fork) -> None:
    torchrun = ("torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port())
    program = fork_program(*torchrun, "-m", "playground", "collectives", "--json")
    steps = list(LESSONS["collectives"].steps)
    ours = world(2).run(run_steps, [LESSONS["collectives"].remote(step) for step in steps])
    out, err = program.communicate(timeout=ENOUGH)
    assert program.returncode == 0, err
    theirs = {step["name"]: step["ranks"] for step in json.loads(out)["steps"]}
    assert theirs == {step: [ours[0][i], ours[1][i]] for i, step in enumerate(steps)}


def test_a_world_by_hand_trains_and_rank_0_alone_speaks(fork_program: Fork, data_dir: Path) -> None:
    port = free_port()
    words = ("playground", "sgd", "--epochs", 1, "--limit", 300, "--dataset", "digits", "--data-dir", data_dir)
    second, first = (fork_program(*words, **by_hand(rank, 2, port)) for rank in (1, 0))
    out, err = first.communicate(timeout=ENOUGH)
    assert (first.returncode, err) == (0, "")
    assert out.splitlines()[0].startswith("sgd: gloo on cpu, 2 ranks x ")
    assert sum(map(is_first_epoch, out.splitlines())) == 1
    assert "bit-identical" in out.splitlines()[-1]
    assert second.communicate(timeout=ENOUGH) == ("", "")
    assert second.returncode == 0


def test_ranks_that_wait_in_vain_say_for_whom(start_cli: Start, fork_program: Fork, tmp_path: Path) -> None:
    """Four worlds at a time. Two ranks are processes of their own: torch, imported there, logs nothing about it."""
    lonely, half, unserved, file = free_port(), free_port(), free_port(), f"{tmp_path}/meet"
    hello = partial(fork_program, "playground")
    waiting: list[tuple[Callable[..., Any], str, int, int, int, str]] = [
        (start_cli, lonely, 0, 2, 1, "rank 1 did not come"),
        (start_cli, unserved, 1, 2, 1, "rank 0, which is to serve the store there, did not come"),
        (hello, half, 0, 4, 2, "ranks 1, 3 did not come"),
        (hello, half, 2, 4, 2, "ranks 1, 3 did not come"),
        (hello, file, 1, 2, 1, "rank 0 did not come"),
    ]
    started = [wait_in_vain(start, place, rank, size, seconds) for start, place, rank, size, seconds, _ in waiting]
    for (start, place, rank, size, seconds, why), process in zip(waiting, started, strict=True):
        _, err = process.communicate(timeout=ENOUGH)
        where = place if place == file else f"127.0.0.1:{place}"
        explained = f"playground: rank {rank} of {size} waited {seconds} s at {where}: {why}\n"
        assert (process.returncode, without_log(err) if start is hello else err) == (1, explained)


def wait_in_vain(start: Callable[..., Any], place: str, rank: int, size: int, seconds: int) -> Any:
    """A rank that comes to a port, or to a file."""
    if place.isdigit():
        return start("hello", "--timeout", seconds, **by_hand(rank, size, place))
    method = f"file://{place}"
    return start("hello", "--timeout", seconds, "--init-method", method, RANK=str(rank), WORLD_SIZE=str(size))


def without_log(err: str) -> str:
    """What is not of torch's log, which can be turned off only before torch is imported."""
    return "".join(line for line in err.splitlines(keepends=True) if not re.match(r"\[W\d{4} .* socket\.cpp", line))


def test_a_taken_master_port_is_explained(run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in by_hand(0, 2, port).items():
            monkeypatch.setenv(name, value)
        blocked = run_cli("hello", "--json")
    assert (blocked.code, blocked.out) == (2, "")
    explained = f"cannot listen on 127.0.0.1:{port} (Address already in use): choose another port"
    assert blocked.err == f"playground: {explained}\n"
