"""Bytes that a rank sends, counted call by call: a message is counted as it is, a collective by the
formula of `bytes_sent`."""

from __future__ import annotations

import re
from collections import Counter

import torch
import torch.distributed as dist

from playground.algorithms.bytes_sent import bytes_sent
from playground.base.upstream import parts_of_sparse
from playground.tap import MESSAGES, Call, Observer

VARIANT = re.compile(r"((_into)?_tensor|_single)?(_coalesced)?$")
"""The end of a function's name, which does not change what is sent."""


def bytes_of(tensor: torch.Tensor) -> int:
    """The size of a tensor's elements; of a sparse tensor, that of its indices and values."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(part.nbytes for part in parts_of_sparse(tensor)) if tensor.is_sparse else 0


def sent_by(call: Call) -> float:
    """Bytes that this rank sends to others in a call. Raises `KeyError` for an operation that
    `bytes_sent` does not know."""
    if call.method in MESSAGES:
        return sum(map(bytes_of, call.inputs))
    size = len(call.ranks)
    own = call.ranks.index(dist.get_rank())
    # uneven: all but what stays here
    if call.name == "all_to_all_single" and (splits := call.args[3]):
        [rows] = call.inputs
        return rows.nbytes * (1 - splits[own] / max(1, len(rows)))
    if call.name == "all_to_all":
        return sum(bytes_of(each) for rank, each in enumerate(call.inputs) if rank != own)
    given, got = (sum(map(bytes_of, tensors)) for tensors in (call.inputs, call.outputs))
    root = 0 if call.peer is None else call.ranks.index(call.peer)
    return bytes_sent(VARIANT.sub("", call.name), size, max(given, got), (own - root) % size)


class Traffic(Observer):
    """Counts calls, by operation, and the bytes that this rank sends in them."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.sent = 0.0

    def begun(self, call: Call) -> None:
        self.calls[call.name] += 1
        self.sent += sent_by(call)
