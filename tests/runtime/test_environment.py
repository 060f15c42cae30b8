"""The variables that say which rank of which world this process is."""

from __future__ import annotations

import pytest

from playground.runtime import UsageError
from playground.runtime.meeting.environment import rank_env_from

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_no_variables_no_world() -> None:
    assert rank_env_from({"MASTER_ADDR": "localhost"}) is None


def test_torchrun_s_variables() -> None:
    env = rank_env_from(TORCHRUN)
    assert env is not None
    assert (env.rank, env.size, env.local_rank, env.local_size) == (5, 8, 1, 4)
    assert (env.rendezvous.host, env.rendezvous.port, env.rendezvous.local, env.rendezvous.served) == (
        "10.0.0.7", 29500, False, False,
    )  # fmt: skip


def test_variables_set_by_hand_on_one_host() -> None:
    env = rank_env_from(BY_HAND)
    assert env is not None
    assert (env.local_rank, env.local_size) == (1, 2)
    assert env.rendezvous.local
    assert env.rendezvous.served


def test_tcp_needs_no_master() -> None:
    env = rank_env_from({"RANK": "0", "WORLD_SIZE": "2"}, "tcp://10.0.0.7:29500")
    assert env is not None
    assert (env.rendezvous.host, env.rendezvous.port, env.rendezvous.local) == ("10.0.0.7", 29500, False)


def test_ranks_that_are_started_one_by_one_need_a_port() -> None:
    with pytest.raises(UsageError, match="need to know the port"):
        rank_env_from({"RANK": "0", "WORLD_SIZE": "2"}, "tcp://10.0.0.7:0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, "RANK, MASTER_ADDR, MASTER_PORT set without WORLD_SIZE"),
        ({"RANK": None}, "set without RANK"),
        ({"MASTER_PORT": None}, "set without MASTER_PORT"),
        ({"RANK": "8"}, r"RANK=8 is outside \[0, 8\)"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is outside"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a whole number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is outside"),
        ({"LOCAL_RANK": "4"}, r"LOCAL_RANK=4 is outside \[0, 4\)"),
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": None}, r"LOCAL_RANK=8 is outside \[0, 8\)"),
        ({"MASTER_ADDR": "tcp://10.0.0.7"}, "MASTER_ADDR='tcp://10.0.0.7' is not a host"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is outside"),
    ],
)
def test_contradictions_are_named(change: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(UsageError, match=message):
        rank_env_from(environ)
