"""What a rank asks of its host: a share of the cores, a core, no interruptions; and who is on the
same host."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from playground.base import host
from playground.world import UsageError


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The cores that this thread is bound to, on a host of two."""
    monkeypatch.delenv("PLAYGROUND_TUNING", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 7})
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    return bound


def train_as(local_rank: int, local_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_size))
    host.keep_to_one_core()


def test_ranks_that_share_cores_evenly_keep_to_one_each(
    bound: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(4):
        train_as(rank, 4, monkeypatch)
    assert bound == [{4}, {7}, {4}, {7}]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_scheduler_decides_where_cores_are_enough_or_cannot_be_shared_evenly(
    size: int, bound: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    train_as(0, size, monkeypatch)
    assert bound == []


def test_without_tuning_nothing_is_asked_for(
    bound: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda *words: asked.append(words))
    host.use_batch_scheduling()
    assert asked == [(0, os.SCHED_BATCH, os.sched_param(0))]
    monkeypatch.setenv("PLAYGROUND_TUNING", "0")
    host.use_batch_scheduling()
    train_as(0, 4, monkeypatch)
    assert (len(asked), bound) == (1, [])


def test_each_rank_has_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cores", lambda: 8)
    assert [host.threads_per_rank(ranks) for ranks in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


def test_hosts_are_in_the_order_of_their_first_ranks() -> None:
    assert host.ranks_by_host("baab") == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("hosts", "ids"), [(1, [0, 0, 0, 0, 0]), (2, [0, 0, 0, 1, 1]), (5, [0, 1, 2, 3, 4])]
)
def test_simulated_hosts_have_as_many_ranks_as_evenly_as_can_be(
    hosts: int, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAYGROUND_HOSTS", str(hosts))
    monkeypatch.setenv("WORLD_SIZE", "5")
    found = []
    for rank in range(5):
        monkeypatch.setenv("RANK", str(rank))
        found.append(host.host_id())
    assert found == [f"simulated host {number}" for number in ids]


def test_there_are_no_more_hosts_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PLAYGROUND_HOSTS", "3"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="PLAYGROUND_HOSTS"):
        host.host_id()


def test_a_digest_is_a_signed_number_that_is_the_same_everywhere() -> None:
    """As hosts compare theirs."""
    assert host.digest("one host") == host.digest("one host") != host.digest("another")
    found = [host.digest(str(number)) for number in range(100)]
    assert all(-(2**63) <= number < 2**63 for number in found)
    assert min(found) < 0 < max(found)


def test_a_host_that_refuses_scheduling_policies_runs_ranks_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def refuse(*words: Any) -> None:
        asked.append(words)
        raise OSError(errno.EINVAL, "Invalid argument")  # what gVisor says

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 * len(os.sched_getaffinity(0))))
    host.use_batch_scheduling()
    host.keep_to_one_core()
    assert len(asked) == 2
