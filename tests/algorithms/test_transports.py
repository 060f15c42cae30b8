"""Our algorithms over other transports: through a file, and in batches as on nccl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_tensors import bits_of

from playground.algorithms import ALGORITHMS, load_algorithm, load_all_reduce
from playground.algorithms.hosts import Hosts
from playground.algorithms.pipelined_ring import PIECE
from playground.algorithms.process_group import ProcessGroupTransport
from playground.algorithms.transport import Addressed
from playground.algorithms.transports import use_transport
from playground.runtime.backends import BACKENDS
from playground.testing import World

Worlds = Callable[..., World]


class Letters:
    """Messages under way through a store: what is sent has been copied there already."""

    def __init__(self, store: Any, receives: list[tuple[str, torch.Tensor]]) -> None:
        self.store, self.receives = store, receives

    def received(self) -> None:
        for key, tensor in self.receives:
            tensor.copy_(torch.frombuffer(bytearray(self.store.get(key)), dtype=tensor.dtype))
        self.receives = []

    def sent(self) -> None:
        pass


class StoreTransport:
    """A transport that uses nothing of the process group: every message is a key of a store."""

    batched = False
    allows_threads = True

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.numbers: Counter[tuple[int, int]] = Counter()

    def start(self, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Letters:
        for tensor, to in send:
            self.store.set(self.key(self.rank, to), bits_of(tensor))
        return Letters(self.store, [(self.key(source, self.rank), tensor) for tensor, source in receive])

    def hosts(self, device: torch.device) -> Hosts:
        """Two of them, where there are ranks enough."""
        return Hosts.from_ids([rank % 2 for rank in range(self.size)])

    def segment(self, device: torch.device) -> str:
        return "there is a store"

    def key(self, source: int, to: int) -> str:
        """Number of the next message from one rank to another."""
        self.numbers[source, to] += 1
        return f"{source}-{to}-{self.numbers[source, to]}"


def all_by_another_transport(rank: int, size: int, folder: Path, numels: list[int]) -> dict[str, bool]:
    """Whether every algorithm is right on a transport through a file; that of the process group must not be used."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the process group was used")

    right = {}
    transport = StoreTransport(dist.FileStore(str(folder / "store"), size), rank, size)
    with use_transport(lambda group: transport):
        used, ProcessGroupTransport.start = ProcessGroupTransport.start, refuse  # type: ignore[method-assign,assignment]
        try:
            for numel in numels:
                given = [torch.arange(size * numel) * (other + 1) for other in range(size)]
                total = torch.stack(given).sum(0)
                for name in ALGORITHMS:
                    tensor = given[rank].clone()
                    load_all_reduce(name)(tensor)
                    right[f"{name} {numel}"] = torch.equal(tensor, total)
                share, whole = torch.empty_like(total[:numel]), torch.empty_like(total)
                load_algorithm("reduce_scatter", "ring")(share, given[rank])
                right[f"reduce-scatter {numel}"] = torch.equal(share, total[rank * numel : (rank + 1) * numel])
                load_algorithm("all_gather", "ring")(whole, share)
                right[f"all-gather {numel}"] = torch.equal(whole, total)
        finally:
            ProcessGroupTransport.start = used  # type: ignore[method-assign]
    tensor = torch.ones(1)
    load_all_reduce("ring")(tensor)  # and from here on it is used again
    right["process group"] = tensor.item() == size
    return right


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(5, marks=pytest.mark.stress)])
def test_any_transport_will_do(size: int, world: Worlds, tmp_path: Path) -> None:
    """Messages that go through a file, one of them in pieces."""
    for right in world(size).run(all_by_another_transport, tmp_path, [3, PIECE // 8 + 1]):
        assert right == dict.fromkeys(right, True)


def our_all_reduce_as_on_nccl(rank: int, size: int, numel: int) -> dict[str, list[bool]]:
    """Messages in batches, and no second thread: for each algorithm, whether it was right, synchronous and not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BACKENDS["gloo"], "batches_messages", True)
        patch.setattr(BACKENDS["gloo"], "allows_threads", False)
        return {name: all_reduce_twice(load_all_reduce(name), rank, size, numel) for name in ALGORITHMS}


def all_reduce_twice(all_reduce: Any, rank: int, size: int, numel: int) -> list[bool]:
    mine = torch.arange(numel, dtype=torch.int64) * (rank + 1)
    expected = torch.arange(numel) * sum(range(size + 1))
    ours, beside = mine.clone(), mine.clone()
    all_reduce(ours)
    work = all_reduce(beside, async_op=True)
    done = work.is_completed()  # nothing is left to a thread
    work.wait()
    return [torch.equal(ours, expected), torch.equal(beside, expected), done]


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.stress)])
def test_our_all_reduce_where_messages_go_in_batches_and_no_second_thread_may(size: int, world: Worlds) -> None:
    for right in world(size).run(our_all_reduce_as_on_nccl, 1_000_003):
        assert right == {name: [True] * 3 for name in ALGORITHMS}
