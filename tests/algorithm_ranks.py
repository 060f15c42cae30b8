"""What the ranks of the tests of our algorithms run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import ALGORITHMS, OURS, load_algorithm, load_all_reduce
from playground.algorithms.messages import Messages, observed
from playground.algorithms.process_group import ProcessGroupTransport
from playground.algorithms.transport import Addressed
from playground.algorithms.transports import use_transport
from playground.runtime import device


def data_for(rank: int, shape: list[int], layout: str, dtype: str, seed: int) -> torch.Tensor:
    """A tensor with this rank's numbers, small enough that no sum or product of eight of them overflows a float16."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    if layout == "every other" and shape:
        shape = [*shape[:-1], 2 * shape[-1]]
    numbers = torch.randint(-2, 3, shape, generator=generator)
    if getattr(torch, dtype).is_floating_point or getattr(torch, dtype).is_complex:
        numbers = numbers + torch.rand(shape, generator=generator) / 4
    tensor = numbers.to(getattr(torch, dtype))
    if layout == "transposed":
        return tensor.t() if tensor.dim() == 2 else tensor.movedim(0, -1) if shape else tensor
    return tensor[..., ::2] if layout == "every other" and shape else tensor


def bits_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def agree(ours: torch.Tensor, theirs: torch.Tensor, dtype: str) -> bool:
    """Whether they are equal; for floating point, up to rounding."""
    if not (ours.is_floating_point() or ours.is_complex()):
        return torch.equal(ours, theirs)
    rounding = {"float16": 2e-2, "bfloat16": 1e-1, "float64": 1e-12}.get(dtype, 1e-5)
    return torch.allclose(ours, theirs, rtol=rounding, atol=rounding)


def compare_all_reduce(rank: int, size: int, cases: list[Any]) -> list[dict[str, Any]]:
    """Each case by our algorithm and by the backend: whether they agree, and the bits of ours."""
    outcomes = []
    for name, shape, layout, (dtype, op), seed in cases:
        ours = data_for(rank, shape, layout, dtype, seed)
        strides = ours.stride()
        theirs = ours.clone(memory_format=torch.contiguous_format)
        if op == "AVG":  # gloo has none that can be trusted
            dist.all_reduce(theirs)
            theirs /= size
        else:
            dist.all_reduce(theirs, getattr(dist.ReduceOp, op))
        load_all_reduce(name)(ours, getattr(dist.ReduceOp, op))
        assert ours.stride() == strides
        outcomes.append({"right": agree(ours, theirs, dtype), "bits": bits_of(ours)})
    return outcomes


def compare_reduce_scatter(rank: int, size: int, cases: list[Any]) -> list[bool]:
    """Each case by our reduce-scatters and by the backend: whether they agree and ours leave the input alone."""
    outcomes = []
    for shape, layout, (dtype, op), seed in cases:
        for name in OURS["reduce_scatter"]:
            given = data_for(rank, [size, *shape], layout, dtype, seed)
            theirs = torch.empty(given.numel() // size, dtype=given.dtype)
            plain = given.clone(memory_format=torch.contiguous_format).view(-1)
            if op == "AVG":
                dist.reduce_scatter_tensor(theirs, plain.clone())
                theirs /= size
            else:
                dist.reduce_scatter_tensor(theirs, plain.clone(), getattr(dist.ReduceOp, op))
            ours = torch.empty_like(theirs)
            load_algorithm("reduce_scatter", name)(ours, given, getattr(dist.ReduceOp, op))
            outcomes.append(agree(ours, theirs, dtype) and torch.equal(given.reshape(-1), plain))
    return outcomes


def compare_all_gather(rank: int, size: int, cases: list[Any]) -> list[bool]:
    """Each case by every one of our all-gathers and by the backend: whether they agree."""
    outcomes = []
    for shape, layout, (dtype, _), seed in cases:
        for name in OURS["all_gather"]:
            given = data_for(rank, shape, layout, dtype, seed)
            theirs = torch.empty(size * given.numel(), dtype=given.dtype)
            dist.all_gather_into_tensor(theirs, given.clone(memory_format=torch.contiguous_format).view(-1))
            ours = data_for(rank, [size, *given.shape], layout, dtype, seed)  # of any layout too
            if ours.numel() != theirs.numel():
                ours = torch.empty([size, *given.shape], dtype=given.dtype)
            strides = ours.stride()
            load_algorithm("all_gather", name)(ours, given)
            outcomes.append(bits_of(ours) == bits_of(theirs) and ours.stride() == strides)
    return outcomes


def scatter_and_gather_in_group(rank: int, size: int, members: list[int]) -> dict[str, list[float]]:
    """What the phases leave in a group of these ranks; -1 where nothing was written."""
    group = dist.new_group(members)
    share, whole = torch.full((2,), -1.0), torch.full((2 * len(members),), -1.0)
    given = torch.arange(2.0 * len(members)) + rank
    load_algorithm("reduce_scatter", "ring")(share, given, group=group)
    load_algorithm("all_gather", "ring")(whole, given[:2], group=group)
    return {"share": share.tolist(), "whole": whole.tolist()}


def scatter_and_gather_in_background(rank: int, size: int) -> tuple[list[list[float]], list[float]]:
    """Both phases with `async_op`, several at once."""
    shares = [torch.zeros(1) for _ in range(3)]
    works: list[Any] = [
        load_algorithm("reduce_scatter", "ring")(share, torch.arange(size) + 10.0 * number, async_op=True)
        for number, share in enumerate(shares)
    ]
    whole = torch.zeros(size)
    works.append(load_algorithm("all_gather", "ring")(whole, torch.tensor([float(rank)]), async_op=True))
    assert all(work.wait() for work in works)
    assert all(work.is_completed() for work in works)
    return [share.tolist() for share in shares], whole.tolist()


def refuse_shares(rank: int, size: int, collective: str, output: tuple[int, ...], input_: tuple[int, ...]) -> None:
    """Call it on tensors of these shapes; those without dimensions differ in type."""
    other = torch.zeros(input_, dtype=torch.float32 if input_ else torch.int64)
    pair = (torch.zeros(output), other)
    load_algorithm(collective, "ring")(*pair)


def all_reduce_large(rank: int, size: int, numel: int, names: list[str]) -> dict[str, bool]:
    right = {}
    for name in names:
        ours = torch.arange(numel, dtype=torch.int32, device=device()) * (rank + 1)
        theirs = ours.clone()
        dist.all_reduce(theirs)
        load_all_reduce(name)(ours)
        right[name] = torch.equal(ours, theirs)
    return right


def all_reduce_in_group(rank: int, size: int, members: list[int], names: list[str]) -> dict[str, float]:
    group = dist.new_group(members)
    after = {}
    for name in names:
        tensor = torch.full((5,), rank + 1.0, device=device())
        load_all_reduce(name)(tensor, group=group)
        assert (tensor == tensor[0]).all()
        after[name] = tensor[0].item()
    return after


def messages_of(call: Callable[[], object]) -> dict[str, int]:
    """How many messages this rank sends in a call, and how many bytes."""
    sent: list[int] = []

    def note(messages: Messages, send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        sent.extend(part.nbytes for part, _ in send)

    with observed(note):
        call()
    return {"messages": len(sent), "bytes": sum(sent)}


def count_messages(rank: int, size: int, numel: int, names: list[str]) -> dict[str, dict[str, int]]:
    """What this rank sends, by all-reduce, and in the two phases of the ring."""
    whole, share = torch.zeros(numel), torch.zeros(numel // size)
    counts = {name: messages_of(lambda name=name: load_all_reduce(name)(whole)) for name in names}  # type: ignore[misc]
    counts["reduce_scatter"] = messages_of(lambda: load_algorithm("reduce_scatter", "ring")(share, whole))
    counts["all_gather"] = messages_of(lambda: load_algorithm("all_gather", "ring")(whole, share))
    return counts


def memory_beside(rank: int, size: int, name: str, numel: int) -> int:
    """Bytes of memory, other than the tensor's, into which the algorithm receives or from which it sends."""
    tensor, beside = torch.zeros(numel), {}

    def note(messages: Messages, send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        for part, _ in [*send, *receive]:
            storage = part.untyped_storage()
            if storage.data_ptr() != tensor.untyped_storage().data_ptr():
                beside[storage.data_ptr()] = storage.nbytes()

    with observed(note):
        load_all_reduce(name)(tensor)
    return sum(beside.values())


def fail_inside_all_reduce(rank: int, size: int) -> None:
    def note(messages: Messages, send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        if rank == 1 and messages.flat.max() > 1:  # it has added something already
            raise ValueError("no more")

    with observed(note):
        load_all_reduce("ring")(torch.ones(100))


def receive_across_all_reduce(rank: int, size: int, names: list[str]) -> list[str]:
    """A receive of the user's own is under way, between the same two ranks, while our messages pass."""
    received = []
    for name in names:
        letter = torch.zeros(3)
        waiting = dist.irecv(letter, 1 - rank)
        load_all_reduce(name)(torch.ones(1000))
        dist.send(torch.full((3,), 7.0), 1 - rank)
        waiting.wait()
        received.append("from the other" if (letter == 7).all() else str(letter.tolist()))
    return received


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

    def key(self, source: int, to: int) -> str:
        """Of the next message from one rank to another."""
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
