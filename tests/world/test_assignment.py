"""Ranks find the launcher's surroundings, and code written for torchrun or for the tutorials runs
in them unchanged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import init_process_group

from playground import RankFailed, launch
from playground.world.rank.assignment import takes_rank
from playground.world.rendezvous.rendezvous import listen


def read_surroundings(rank: int, size: int) -> tuple[str | None, str | None, str]:
    return os.environ.get("OF_THE_TEST"), os.environ.get("HOME"), os.getcwd()


def test_environment_and_folder_are_the_launcher_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch(read_surroundings, 1)  # the fork server is up, and does not know what comes now
    monkeypatch.setenv("OF_THE_TEST", "set")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    assert launch(read_surroundings, 2) == [("set", None, str(tmp_path))] * 2
    monkeypatch.undo()
    assert launch(read_surroundings, 1)[0][0] is None


def add_up() -> float:
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def main() -> tuple[int, int, int, float]:
    """What a script for torchrun does."""
    dist.init_process_group("gloo")
    total = add_up()
    place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    dist.destroy_process_group()
    return *place, total


@pytest.mark.parametrize("size", [1, 3])
def test_a_script_for_torchrun_runs_unchanged(size: int) -> None:
    total = size * (size + 1) / 2
    for _ in range(2):
        assert launch(main, size) == [(rank, size, rank, total) for rank in range(size)]


def init_by_its_imported_name(rank: int, size: int) -> tuple[int, float]:
    init_process_group(backend="gloo", init_method="env://")
    return dist.get_rank(), add_up()


def init_as_the_tutorial(rank: int, size: int, port: int) -> float:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    return add_up()


def init_twice(rank: int, size: int) -> float:
    total = 0.0
    group = dist.new_group()
    dist.barrier(group)  # all have connected
    dist.destroy_process_group(group)  # which leaves the world as it is
    for _ in range(2):
        dist.init_process_group("gloo")
        total += add_up()
        dist.destroy_process_group()
    return total


def test_a_function_may_init_the_process_group_itself() -> None:
    assert launch(init_by_its_imported_name, 2) == [(0, 3.0), (1, 3.0)]
    assert launch(init_twice, 3) == [12.0] * 3
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    assert launch(init_as_the_tutorial, 2, args=(port,)) == [3.0] * 2


def init_with_a_store_of_its_own(rank: int, size: int) -> int:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return store.num_keys()


def test_a_function_may_bring_its_own_store() -> None:
    assert launch(init_with_a_store_of_its_own, 1)[0] > 0


def with_options(argv: object = None, **options: object) -> None: ...


def with_more(*numbers: int) -> None: ...


def test_only_a_function_that_asks_for_them_is_given_rank_and_size() -> None:
    assert not takes_rank(with_options)
    assert takes_rank(with_more)


def destroy(rank: int, size: int) -> bool:
    total = add_up()
    dist.destroy_process_group()
    return total == 3.0 and not dist.is_initialized()


def init_a_second_one(rank: int, size: int) -> None:
    dist.init_process_group("gloo")
    dist.init_process_group("gloo")


def test_a_function_may_destroy_the_process_group() -> None:
    assert launch(destroy, 2) == [True, True]


def test_two_at_a_time_are_refused_as_ever() -> None:
    with pytest.raises(RankFailed, match="trying to initialize the default process group twice"):
        launch(init_a_second_one, 2)
