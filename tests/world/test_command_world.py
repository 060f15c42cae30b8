"""The ranks that a command runs on: new ones, or those of a world that somebody has started."""

from __future__ import annotations

import os

import pytest
from processes import by_hand, free_port

from playground.world import UsageError, restart_count
from playground.world.backends import BACKENDS
from playground.world.command_world import CommandWorld

NCCL = BACKENDS["nccl"]


def test_what_nccl_logs_when_it_aborts_is_not_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(NCCL), "check", lambda self, local_ranks, joined=False: "")
    for backend, level in (("gloo", "FATAL"), ("nccl", "ERROR")):
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "to be restored")
        monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
        CommandWorld(1, backend=backend)
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == level
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    CommandWorld(1)
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO", "the user's"


@pytest.mark.parametrize("rank", [0, 1])
def test_of_a_world_that_is_joined_rank_0_alone_shows_results(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CommandWorld(2).is_main, "the parent of the ranks"
    for name, value in by_hand(rank, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    assert CommandWorld(None).is_main == (rank == 0)


def test_whoever_started_a_world_restarts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in by_hand(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    CommandWorld(None)
    with pytest.raises(UsageError, match="with torchrun: --max-restarts 3"):
        CommandWorld(None, restarts=3)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert restart_count() == 2
