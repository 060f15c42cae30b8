"""Worlds that somebody else started: torchrun, and variables set by hand."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ddp_mistakes import MISTAKES
from fixtures import Fork
from processes import ENOUGH, by_hand, free_port


def test_a_world_by_hand_trains_and_rank_0_alone_speaks(fork_program: Fork) -> None:
    port = free_port()
    words = ("playground", "parameter-server", "--steps", 1, "--compute", 1)
    second, first = (fork_program(*words, **by_hand(rank, 2, port)) for rank in (1, 0))
    out, err = first.communicate(timeout=ENOUGH)
    assert (first.returncode, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["all_reduce", "synchronous"]
    assert second.communicate(timeout=ENOUGH) == ("", "")
    assert second.returncode == 0


def test_ranks_that_wait_in_vain_say_for_whom(fork_program: Fork) -> None:
    port = free_port()
    program = fork_program("playground", "hello", "--timeout", 0.3, **by_hand(0, 3, port))
    _, err = program.communicate(timeout=ENOUGH)
    # Before it stands what torch logs: that can be turned off only before torch is imported.
    assert (
        err.splitlines()[-1]
        == f"playground: rank 0 of 3 waited 0.3 s at 127.0.0.1:{port}: ranks 1-2 did not come"
    )
    assert program.returncode == 1


def test_a_taken_master_port_is_explained(
    run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in by_hand(0, 2, port).items():
            monkeypatch.setenv(name, value)
        blocked = run_cli("hello")
    assert (blocked.code, blocked.out) == (2, "")
    explained = f"cannot listen on 127.0.0.1:{port} (Address already in use): choose another port"
    assert blocked.err == f"playground: {explained}\n"


def test_a_rank_that_gloo_has_aborted_is_explained_on_the_first_that_is_left(
    fork_program: Fork, tmp_path: Path
) -> None:
    script = MISTAKES["early-stop"]
    (tmp_path / "train.py").write_text(script.text)
    port = free_port()
    words = "playground", "run", str(tmp_path / "train.py")
    ranks = [fork_program(*words, **by_hand(rank, 3, port)) for rank in range(3)]
    told = [program.communicate(timeout=ENOUGH)[1] for program in ranks]
    named = [script.is_named_by(err) for err in told]
    assert sum(named) == 1, "\n".join(told)
    cure = "rank 1 calls all_reduce (train.py:20), ranks 0, 2 do not: is it under a condition"
    assert cure in " ".join(told[named.index(True)].split())
