"""The variables that say which rank of which world this process is."""

from __future__ import annotations

import pytest

from playground.world import UsageError
from playground.world.rendezvous.environment import rank_env_from, take_slurm_place
from playground.world.rendezvous.rendezvous import Rendezvous, Server

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_no_variables_no_world() -> None:
    assert rank_env_from({"MASTER_ADDR": "localhost"}) is None


@pytest.mark.parametrize(
    ("environ", "place", "host", "local", "server"),
    [
        (TORCHRUN, (5, 8, 1, 4), "10.0.0.7", False, Server.TORCHRUN),
        (BY_HAND, (1, 2, 1, 2), "127.0.0.1", True, Server.RANK_0),
        ({**BY_HAND, "MASTER_ADDR": "10.0.0.7"}, (1, 2, 0, 1), "10.0.0.7", False, Server.RANK_0),
    ],
)
def test_the_place_of_a_rank(
    environ: dict[str, str], place: tuple[int, ...], host: str, local: bool, server: Server
) -> None:
    env = rank_env_from(environ)
    assert env is not None
    assert (env.rank, env.size, env.local_rank, env.local_size) == place
    assert env.rendezvous == Rendezvous(host=host, port=29500, local=local, server=server)


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


SLURM = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "gpu[08-10],login",
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
}  # fmt: skip
ON_ONE_HOST = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NODELIST": "gpu8",
    "SLURM_PROCID": "1", "SLURM_NODEID": "0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "place", "address"),
    [
        ({}, (5, 7, 1, 2), ("gpu08", 24453)),
        ({"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}, (6, 7, 0, 1), None),
        ({"SLURM_STEP_NODELIST": "a-b,gpu[1-3]"}, (5, 7, 1, 2), ("a-b", 24453)),
        ({"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1"}, (5, 7, 1, 2), ("10.0.0.7", 1)),
        (ON_ONE_HOST, (1, 4, 1, 4), ("127.0.0.1", 24453)),
    ],
)
def test_a_task_of_srun_has_its_place(
    change: dict[str, str], place: tuple[int, ...], address: tuple[str, int] | None
) -> None:
    environ = SLURM | change
    take_slurm_place(environ)
    env = rank_env_from(environ)
    assert env is not None
    assert (env.rank, env.size, env.local_rank, env.local_size) == place
    assert address in (None, (env.rendezvous.host, env.rendezvous.port))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # a shell: srun --pty bash
        {**SLURM, **TORCHRUN},
    ],
)
def test_what_no_task_of_several_is_stays_as_it_is(environ: dict[str, str]) -> None:
    before = dict(environ)
    take_slurm_place(environ)
    assert environ == before
