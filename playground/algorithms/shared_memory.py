"""Collectives in the memory that the ranks of one host share: nothing is sent, so no ring is
needed.

    small tensors       copy in | add all slots                                          one meeting
    others, two ranks   copy in | add the other's slot                                 one per piece
    others, N ranks     copy in | add my share, copy it in | copy out the other shares  two per slot

`|` is a meeting of all ranks. They add in the order of the ranks, so that their sums have the same
bits.

In a ring, sums must travel: each rank sends 2 (N - 1) / N * S bytes. Here they lie where all can
read them, and the limit is the memory. To sum in place, every input is read once and every output
written once, by whichever core: at B bytes per second, loads and stores counted, this takes at
least 2 N S / B seconds: about what `bench --limit` shows, all ranks copying S bytes at once.
Source: DeepSpeed's all-reduce for CPUs, https://github.com/deepspeedai/DeepSpeed/pull/5391
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from playground.algorithms.operation import ADDS, name_of
from playground.algorithms.segment import SLOT, Segment

SMALL = 128 * 1024
"""Bytes up to which each rank adds all slots, with one meeting."""
PIECE = 512 * 1024
"""Bytes that two ranks copy in before they meet: still in the nearest cache when they are added."""
CALLS = ("all_reduce", "step")
OPS = tuple(ADDS)
DTYPES = tuple(
    dict.fromkeys(each for each in vars(torch).values() if isinstance(each, torch.dtype))
)


@functools.cache
def say_why_not(excuse: str, rank: int) -> None:
    """Have the first rank say why all send messages, once for each excuse."""
    if rank == 0:
        print(f"the ranks share no memory ({excuse}): they send messages", file=sys.stderr)


def one_call(collective: Callable[..., None]) -> Callable[..., None]:
    """Make it a call of its segment, in which an error breaks the segment for all ranks."""
    return functools.wraps(collective)(
        lambda segment, *args, **named: segment.run(collective, *args, **named)
    )


@one_call
def all_reduce(segment: Segment, flat: torch.Tensor, op: Any) -> None:
    """Leave in a flat tensor, on every rank of the segment, what `op` makes of all their tensors;
    AVG adds, as SUM.

    Raises `RuntimeError` on all ranks if they call it with different operations, types or sizes.
    """
    if flat.nbytes <= SMALL:
        add_whole(segment, flat, op)
    else:
        add_by_slots(segment, flat, op)


def add_whole(segment: Segment, flat: torch.Tensor, op: Any) -> None:
    """All-reduce of small tensors."""
    slots = segment.slots(segment.half, flat.dtype, flat.numel())
    slots[segment.rank].copy_(flat)
    agree(segment, "all_reduce", flat, op)  # where they meet: from now on each sees all slots
    add_all(ADDS[op], slots, out=flat)


def add_by_slots(segment: Segment, flat: torch.Tensor, op: Any) -> None:
    """All-reduce of larger tensors, slot by slot."""
    meet: Callable[[], None] = partial(agree, segment, "all_reduce", flat, op)  # the first time
    for piece in flat.split((PIECE if segment.size == 2 else SLOT) // flat.itemsize):
        if segment.size == 2:
            slots = segment.slots(segment.half, flat.dtype, piece.numel())
            slots[segment.rank].copy_(piece)
            meet()
            add_all(
                ADDS[op], (piece, slots[1]) if segment.rank == 0 else (slots[0], piece), out=piece
            )
        else:
            shares = piece.tensor_split(segment.size)
            reduce_shares(segment, shares, op, meet)
            gather_shares(segment, shares)
        meet = segment.meet


def add_all(add: Callable[..., object], parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add two parts or more, in their order, into `out`, which may be one of the first two."""
    add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        add(out, part, out=out)


def reduce_shares(
    segment: Segment, shares: Sequence[torch.Tensor], op: Any, meet: Callable[[], None]
) -> None:
    """Add up this rank's share, where all shares together fit into a slot."""
    rank = segment.rank
    slots = segment.slots(segment.half, shares[0].dtype, sum(share.numel() for share in shares))
    lengths = [share.numel() for share in shares]
    for other, (there, share) in enumerate(zip(slots[rank].split(lengths), shares, strict=True)):
        if other != rank or rank > 1:
            there.copy_(share)
    meet()
    start = sum(lengths[:rank])
    mine, parts = shares[rank], [slot[start : start + lengths[rank]] for slot in slots]
    if rank <= 1:
        parts[rank] = mine  # which is read before it is written
    add_all(ADDS[op], parts, out=mine)


def gather_shares(segment: Segment, shares: Sequence[torch.Tensor]) -> None:
    """Copy out the other ranks' shares, each of which fits into a slot."""
    slots = segment.slots(segment.half, shares[0].dtype, shares[0].numel())
    slots[segment.rank][: shares[segment.rank].numel()].copy_(shares[segment.rank])
    segment.meet()
    for rank, (slot, share) in enumerate(zip(slots, shares, strict=True)):
        if rank != segment.rank:
            share.copy_(slot[: share.numel()])


def agree(segment: Segment, collective: str, flat: torch.Tensor, op: Any = None) -> None:
    """Meet. Raises `RuntimeError` unless all ranks call the same."""
    op_index = len(OPS) if op is None else OPS.index(op)
    code = CALLS.index(collective) | DTYPES.index(flat.dtype) << 8 | op_index << 16
    calls = segment.agree((flat.numel(), code))
    if len(calls) == 1:
        return
    other = next(rank for rank, call in enumerate(calls) if call != calls[segment.rank])
    told = [
        f"{segment.name(rank)} called {describe(segment, *calls[rank])}"
        for rank in sorted((segment.rank, other))
    ]
    raise RuntimeError(f"the ranks do not call the same collective: {', '.join(told)}")


def describe(segment: Segment, numel: int, code: int) -> str:
    """A call, from the numbers that stand for it."""
    collective = CALLS[code & 255]
    dtype = DTYPES[code >> 8 & 255]
    op = code >> 16
    details = [f"{numel} {name_of(dtype)}", *([OPS[op].name] if op < len(OPS) else [])]
    return f"{collective}({', '.join(details)})"
