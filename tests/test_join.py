"""Worlds that somebody else started: torchrun, and variables set by hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from playground.lessons import LESSONS
from playground.runtime.rendezvous import LOOPBACK_INTERFACE, interface_towards
from playground.runtime.steps import run_steps
from playground.testing import World

Worlds = Callable[..., World]
Start = Callable[..., "subprocess.Popen[str]"]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def by_hand(rank: int, size: int, port: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def test_torchrun_gives_what_our_own_launcher_gives(world: Worlds) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    words = ["-m", "playground", "collectives", "--json"]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, timeout=60, check=True)
    steps = list(LESSONS["collectives"].steps)
    ours = world(2).run(run_steps, [LESSONS["collectives"].remote(step) for step in steps])
    theirs = {step["name"]: step["ranks"] for step in json.loads(done.stdout)["steps"]}
    assert theirs == {step: [ours[0][i], ours[1][i]] for i, step in enumerate(steps)}


def test_a_world_by_hand_trains_and_rank_0_alone_speaks(start_cli: Start, data_dir: Path) -> None:
    port = free_port()
    words = ("sgd", "--epochs", "1", "--limit", "300", "--dataset", "digits", "--data-dir", data_dir)
    second, first = (start_cli(*words, **by_hand(rank, 2, port)) for rank in (1, 0))
    out, err = first.communicate(timeout=60)
    assert (first.returncode, err) == (0, "")
    assert out.splitlines()[0].startswith("sgd: gloo on cpu, 2 ranks x ")
    assert out.splitlines()[1].startswith("epoch  1")
    assert "bit-identical" in out.splitlines()[-1]
    assert second.communicate(timeout=10) == ("", "")
    assert second.returncode == 0


def test_a_rank_that_waits_for_nobody_says_so(start_cli: Start) -> None:
    alone = start_cli("hello", "--timeout", "1", **by_hand(0, 2, free_port()))
    _, err = alone.communicate(timeout=30)
    assert alone.returncode == 1
    assert err.count("\n") == 1
    assert "rank 0 of 2 waited 1 s at 127.0.0.1:" in err
    assert err.endswith(": rank 1 did not come\n")


def test_all_who_came_say_who_is_missing(start_cli: Start) -> None:
    port = free_port()
    here = [start_cli("hello", "--timeout", "3", **by_hand(rank, 4, port)) for rank in (0, 2)]
    for rank, process in zip((0, 2), here, strict=True):
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (
            1, f"playground: rank {rank} of 4 waited 3 s at 127.0.0.1:{port}: ranks 1, 3 did not come\n"
        )  # fmt: skip


def test_nobody_serves_the_store(start_cli: Start) -> None:
    port = free_port()
    alone = start_cli("hello", "--timeout", "1", **by_hand(1, 2, port))
    _, err = alone.communicate(timeout=30)
    explained = f"rank 1 of 2 waited 1 s at 127.0.0.1:{port}: rank 0, which is to serve the store there, did not come"
    assert (alone.returncode, err) == (1, f"playground: {explained}\n")


def test_a_file_without_everyone(start_cli: Start, tmp_path: Path) -> None:
    words = ("--init-method", f"file://{tmp_path}/meet", "--timeout", "1")
    alone = start_cli("hello", *words, RANK="1", WORLD_SIZE="2")
    _, err = alone.communicate(timeout=30)
    explained = f"rank 1 of 2 waited 1 s at {tmp_path}/meet: rank 0 did not come"
    assert (alone.returncode, err) == (1, f"playground: {explained}\n")


def test_a_taken_master_port_is_explained(run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in by_hand(0, 2, port).items():
            monkeypatch.setenv(name, value)
        blocked = run_cli("hello", "--json")
    assert (blocked.code, blocked.out) == (2, "")
    explained = f"cannot listen on 127.0.0.1:{port} (Address already in use): choose another port"
    assert blocked.err == f"playground: {explained}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its interfaces")
def test_the_interface_towards_a_host() -> None:
    assert interface_towards("127.0.0.1") == LOOPBACK_INTERFACE
    assert LOOPBACK_INTERFACE in os.listdir("/sys/class/net")
    assert interface_towards("no such host") is None
