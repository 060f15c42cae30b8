"""The variables that say which rank of which world this process is."""

from __future__ import annotations

import pytest

from playground.runtime import UsageError
from playground.runtime.rendezvous.environment import rank_env_from
from playground.runtime.rendezvous.rendezvous import Rendezvous

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_no_variables_no_world() -> None:
    assert rank_env_from({"MASTER_ADDR": "localhost"}) is None


@pytest.mark.parametrize(
    ("environ", "place", "host", "local", "served"),
    [
        (TORCHRUN, (5, 8, 1, 4), "10.0.0.7", False, False),
        (BY_HAND, (1, 2, 1, 2), "127.0.0.1", True, True),
        ({**BY_HAND, "MASTER_ADDR": "10.0.0.7"}, (1, 2, 0, 1), "10.0.0.7", False, True),
    ],
)
def test_the_place_of_a_rank(
    environ: dict[str, str], place: tuple[int, ...], host: str, local: bool, served: bool
) -> None:
    env = rank_env_from(environ)
    assert env is not None
    assert (env.rank, env.size, env.local_rank, env.local_size) == place
    assert env.rendezvous == Rendezvous(host=host, port=29500, local=local, served=served)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, "RANK, MASTER_ADDR, MASTER_PORT set without WORLD_SIZE"),
        ({"RANK": None}, "set without RANK"),
        ({"MASTER_PORT": None}, "set without MASTER_PORT"),
        ({"RANK": "8"}, r"RANK=8 is outside \[0, 8\)"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is outside"),
        ({"WORLD_SIZE": "1000000"}, "WORLD_SIZE=1000000 is outside"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a whole number"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is outside"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is outside"),
        ({"LOCAL_RANK": "4"}, r"LOCAL_RANK=4 is outside \[0, 4\)"),
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": None}, r"LOCAL_RANK=8 is outside \[0, 8\)"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is outside"),
    ],
)
def test_contradictions_are_named(change: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(UsageError, match=message):
        rank_env_from(environ)
