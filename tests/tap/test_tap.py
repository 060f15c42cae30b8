"""The tap: what an observer learns of every operation, and that nothing of it is left when nobody
observes."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work, _functional_collectives

from playground import launch
from playground.explain.hang.box import SWITCH
from playground.tap import METHODS, Call, Observer, number_of, observing, ranks_of
from playground.tap.replacement import replaced
from playground.tap.tap import _tap
from playground.testing import World


class Log(Observer):
    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.calls: dict[int, Call] = {}

    def begun(self, call: Call) -> None:
        self.calls[call.number] = call
        self.told.append(("begun", call.number))

    def returned(self, call: Call) -> None:
        self.told.append(("returned", call.number))

    def note(self, what: str, calls: Sequence[Call]) -> None:
        self.told += [(what, call.number) for call in calls]

    def waiting(self, calls: Sequence[Call]) -> None:
        self.note("waiting", calls)

    def waited(self, calls: Sequence[Call]) -> None:
        self.note("waited", calls)

    def done(self, calls: Sequence[Call]) -> None:
        self.note("done", calls)

    def failed(self, calls: Sequence[Call], error: BaseException) -> None:
        self.note("failed", calls)

    def dropped(self, calls: Sequence[Call]) -> None:
        self.note("dropped", calls)

    def events(self) -> list[str]:
        """What was told, without the calls."""
        return [what for what, _ in self.told]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def parts(count: int = 2) -> list[torch.Tensor]:
    return [ones(2) for _ in range(count)]


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda **how: dist.all_reduce(ones(2), **how),
    "broadcast": lambda **how: dist.broadcast(ones(2), 1, **how),
    "reduce": lambda **how: dist.reduce(ones(2), 1, **how),
    "all_gather": lambda **how: dist.all_gather(parts(), ones(2), **how),
    "all_gather_into_tensor": lambda **how: dist.all_gather_into_tensor(ones(4), ones(2), **how),
    "gather": lambda **how: dist.gather(
        ones(2), parts() if dist.get_rank() == 1 else None, 1, **how
    ),
    "scatter": lambda **how: dist.scatter(
        ones(2), parts() if dist.get_rank() == 1 else None, 1, **how
    ),
    "reduce_scatter": lambda **how: dist.reduce_scatter(ones(2), parts(), **how),
    "reduce_scatter_tensor": lambda **how: dist.reduce_scatter_tensor(ones(2), ones(4), **how),
    "all_to_all": lambda **how: dist.all_to_all(parts(), parts(), **how),
    "all_to_all_single": lambda **how: dist.all_to_all_single(ones(2), ones(2), **how),
    "barrier": dist.barrier,
}
ROOTED = ("broadcast", "reduce", "gather", "scatter")
SIZES = {
    "all_gather": ([2], [2, 2]), "all_gather_into_tensor": ([2], [4]), "gather": ([2], [2, 2]),
    "barrier": ([], []),
    "scatter": ([2, 2], [2]), "reduce_scatter": ([2, 2], [2]), "reduce_scatter_tensor": ([4], [2]),
    "all_to_all": ([2, 2], [2, 2]),
}  # fmt: skip
"""Elements of the tensors in and out where they are not one of two."""
ENDS = ["begun", "returned", "done", "begun", "returned", "waiting", "waited", "done"]
"""What is told of a call that blocks, and then of one that is waited for."""


def observe_collectives(rank: int, size: int) -> None:
    for name, call in COLLECTIVES.items():
        with observing(log := Log()):
            call()
            work = call(async_op=True)
            assert _tap.works[id(work)].calls == [log.calls[max(log.calls)]]
            work.wait()
            assert _tap.works == {}, "nothing keeps its tensors"
        blocking, issued = log.calls.values()
        assert (blocking.name, blocking.blocks, blocking.ranks, blocking.tag) == (
            name,
            True,
            (0, 1),
            0,
        )
        assert (issued.name, issued.blocks) == (name, False)
        assert log.events() == ENDS, name
        assert blocking.peer == (1 if name in ROOTED else None)
        given, got = SIZES.get(name, ([2], [2]))
        is_root = name not in ("gather", "scatter") or rank == 1
        assert [each.numel() for each in blocking.inputs] == (
            given if name != "scatter" or is_root else []
        )
        assert [each.numel() for each in blocking.outputs] == (
            got if name != "gather" or is_root else []
        )


def observe_messages(rank: int, size: int) -> None:
    """Every way to send and to receive, among them by the group itself."""
    other, group, sender = 1 - rank, dist.new_group(), rank == 0
    with observing(log := Log()):
        if sender:
            dist.send(ones(3), 1, tag=7)
            dist.isend(ones(3), 1).wait()
        else:
            dist.recv(ones(3), 0, tag=7)
            dist.irecv(ones(3)).wait()
        for work in dist.batch_isend_irecv(
            [dist.P2POp((dist.irecv, dist.isend)[sender], ones(3), other)]
        ):
            work.wait()
        if sender:
            dist.send(ones(3), 1, group)
        else:
            dist.recv(ones(3), None, group)
        world: Any = dist.group.WORLD
        (world.send if sender else world.recv)([ones(3)], other, 5).wait()
    plain, issued, batched, grouped, direct = log.calls.values()
    names = ("send", "isend") if sender else ("recv", "irecv")
    assert [call.name for call in log.calls.values()] == [
        names[0],
        names[1],
        names[1],
        names[0],
        names[1],
    ]
    assert [call.tag for call in log.calls.values()] == [7, 0, 0, 0, 5]
    assert (plain.peer, batched.peer, direct.peer) == (other,) * 3
    assert (issued.peer, grouped.peer) == ((1, 1) if sender else (None, None))
    assert grouped.group is group
    assert [len(call.inputs) for call in (plain, issued)] == [sender] * 2
    assert [len(call.outputs) for call in (plain, issued)] == [not sender] * 2


def observe_ends(rank: int, size: int) -> None:
    """A future instead of a wait, a refused call, and a work that is let go of."""
    with observing(log := Log()):
        work: Any = dist.all_reduce(ones(1), async_op=True)
        work.get_future().wait()
        while "done" not in log.events():
            pass
        with pytest.raises((RuntimeError, ValueError)):
            dist.group.WORLD.allreduce([])
        work = dist.all_reduce(ones(1), async_op=True)
        del work
        while "dropped" not in log.events():
            pass
        dist.barrier()
    with contextlib.suppress(ZeroDivisionError), observing(gone := Log()):
        raise ZeroDivisionError
    dist.barrier()
    assert gone.told == []
    assert log.events() == [
        "begun", "returned", "done", "begun", "failed", "begun", "returned", "dropped", "begun",
        "returned", "done",
    ]  # fmt: skip


def observe_futures(rank: int, size: int) -> None:
    """The end of a call is told to who observes then, and who has begun to before: not to one that
    comes later."""
    if rank == 1:
        for _ in range(2):  # joins in when it is told to
            dist.recv(ones(1), 0)
            dist.all_reduce(ones(1))
        return
    with observing(first := Log()):
        kept: Any = dist.all_reduce(ones(1), async_op=True)
        over = kept.get_future().then(lambda _: None)  # after what the tap does
    assert first.events() == ["begun", "returned"]
    with observing(second := Log()):
        dist.send(ones(1), 1)
        over.wait()
    assert second.events() == ["begun", "returned", "done"]
    with observing(third := Log()):
        work: Any = dist.all_reduce(ones(1), async_op=True)
        future = work.get_future()
        del work
        gc.collect()
        assert third.events() == ["begun", "returned"], "a future is enough to wait for"
        dist.send(ones(1), 1)
        future.wait()
        while third.events().count("done") < 2:
            pass


def observe_rare_calls(rank: int, size: int) -> None:
    """Left out arguments, and calls that torch refuses or makes itself."""
    world: Any = dist.group.WORLD
    with observing(log := Log()):
        world.broadcast([ones(1)]).wait()
        with pytest.raises(TypeError):
            world.allreduce([ones(1)], nothing=1)
        with pytest.raises(TypeError):
            world.allreduce([1])
        dist.monitored_barrier()
    default, wrong, monitored = log.calls.values()
    assert (default.peer, monitored.blocks) == (0, True)
    assert ("failed", wrong.number) in log.told
    assert Call(0, "broadcast", world, ([ones(1)], size), blocks=True).peer is None
    with observing(log := Log()):
        works = FunctionType(
            start_both.__code__, {"__name__": "torch.of_this_test", "dist": dist, "ones": ones}
        )(rank)
        while "done" not in log.events():  # nobody waits for what torch itself waits for in C++
            pass
        works[1].wait()
    collective, message = log.calls.values()
    assert (collective.blocks, message.blocks) == (True, False)


def start_both(rank: int) -> list[Any]:
    return [
        dist.all_reduce(ones(1), async_op=True),
        (dist.irecv if rank else dist.isend)(ones(1), 1 - rank),
    ]


def observe_threads(rank: int, size: int) -> None:
    """Each thread has a group; observers come and go meanwhile, and those that are there see the
    same numbers."""
    groups = [dist.new_group() for _ in range(3)]
    with observing(first := Log()), observing(second := Log()):

        def work(group: Any) -> None:
            for _ in range(20):
                dist.all_reduce(ones(1), group=group)

        threads = [threading.Thread(target=work, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            with observing(Observer()):
                pass
    assert first.calls == second.calls
    assert sorted(first.told) == sorted(second.told)
    assert len(first.calls) == 60
    assert first.events().count("done") == 60


def observe_a_batch(rank: int, size: int) -> None:
    """A backend that makes one work of a batch, as nccl does, or none."""
    for makes_work in (True, False):
        observe_one_batch(rank, makes_work)


def observe_one_batch(rank: int, makes_work: bool) -> None:
    def coalescing(real: Any) -> Any:
        return lambda group, device: (
            None if real is start or not makes_work else dist.group.WORLD.barrier()
        )

    start = ProcessGroup._start_coalescing
    with (
        replaced(ProcessGroup, "_start_coalescing", coalescing),
        replaced(ProcessGroup, "_end_coalescing", coalescing),
    ):
        device, group = torch.device("cpu"), dist.group.WORLD
        assert group
        with observing(log := Log()):
            group._start_coalescing(device)
            works = [group.send([ones(1)], 1 - rank, 0), group.recv([ones(1)], 1 - rank, 0)]
            work = group._end_coalescing(device)
            for each in works:
                each.wait()
            if makes_work:
                work.wait()
    waits = ["waiting", "waiting", "waited", "waited"] if makes_work else []
    assert log.events()[-len(waits) - 2 :] == [*waits, "done", "done"]


OBSERVED = (
    observe_collectives, observe_messages, observe_ends, observe_futures, observe_rare_calls,
    observe_threads,
    observe_a_batch,
)  # fmt: skip


def test_an_observer_learns_of_every_call(world: Callable[..., World]) -> None:
    for observe in OBSERVED:
        world(2).run(observe)


class Inside(Log):
    looks_inside = True
    looks_at_ends = False


def observe_functional_collectives(rank: int, size: int) -> list[str]:
    """One is waited for as soon as its result is used."""
    with observing(log := Inside()):
        result = _functional_collectives.all_reduce(ones(2), "sum", dist.group.WORLD)
        assert (result * 1).tolist() == [2.0, 2.0]
        told = log.events()
        parts = _functional_collectives.all_gather_tensor(ones(2), 0, dist.group.WORLD)
        assert (parts * 1).tolist() == [1.0] * 4
    call, gather = log.calls.values()
    assert (call.name, call.in_cpp, call.is_functional) == ("all_reduce", True, True)
    assert [[each.numel() for each in found] for found in (gather.inputs, gather.outputs)] == [
        [2],
        [4],
    ]
    return told


@pytest.mark.torch(2, 14)  # older ones do not tell of what C++ calls
def test_who_looks_inside_learns_of_the_wait_for_a_functional_collective(
    world: Callable[..., World],
) -> None:
    told = ["begun", "returned", "waiting", "waited"]
    assert world(2).run(observe_functional_collectives) == [told] * 2


def wait_in_vain(rank: int, size: int) -> None:
    group = dist.new_group()
    backend: Any = group._get_backend(torch.device("cpu"))
    set_timeout = (
        backend.set_timeout if hasattr(backend, "set_timeout") else backend._set_default_timeout
    )
    set_timeout(timedelta(milliseconds=50))
    if rank == 0:
        with observing(log := Log()):
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(ones(1), group=group)
            gc.collect()
        assert log.events() == ["begun", "returned", "failed"]


def test_an_observer_learns_of_a_wait_that_fails(world: Callable[..., World]) -> None:
    world(2).run(wait_in_vain)


def own_methods(rank: int, size: int) -> list[bool]:
    places = [(ProcessGroup, method) for method in METHODS] + [(Work, "wait"), (Work, "get_future")]

    def are_torchs() -> bool:
        return all(type(vars(owner)[name]).__name__ == "instancemethod" for owner, name in places)

    before = are_torchs()
    with observing(Observer()):
        meanwhile = any(
            type(vars(owner)[name]).__name__ == "instancemethod" for owner, name in places
        )
    return [before, meanwhile, are_torchs()]


def test_without_an_observer_torchs_own_methods_are_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    found = launch(own_methods, 2, fresh=True, check=False)
    assert found == [[True, False, True]] * 2


def test_the_number_of_a_group_is_the_same_in_every_process() -> None:
    """Unlike what Python's `hash` makes of its name."""
    assert [number_of(SimpleNamespace(group_name=name)) for name in ("7", "tp")] == [7, 1519378225]


def test_a_group_that_torch_does_not_know_has_its_own_ranks() -> None:
    """As one of torch's RPC."""
    assert ranks_of(dist.ProcessGroup(dist.HashStore(), 1, 3)) == (0, 1, 2)


def keep_the_calls_of_a_group_that_ends(rank: int, size: int) -> tuple[bool, tuple[int, ...], bool]:
    """Whether a call knows its group; the ranks of it; and whether it does when the group is gone,
    and the call is still there."""
    group, log = dist.new_group([*range(size)]), Log()
    with observing(log):
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
    [call] = log.calls.values()
    was_known = call.group is group
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return was_known, call.ranks, call.group is not None


def test_a_call_keeps_no_group_alive(world: Callable[..., World]) -> None:
    """Threads of gloo call back with it. One that is a group's last owner would wait for itself."""
    found = world(2, fresh=True).run(keep_the_calls_of_a_group_that_ends)
    assert found == [(True, (0, 1), False)] * 2
