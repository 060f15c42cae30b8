"""Bytes that a rank sends: counted, and held back as by a slower link."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from playground.runtime.tap import MESSAGES, Call, Observer

TIMES_SENT = {
    "all_reduce": 2,
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
}
"""How often a rank of N sends (N - 1) / N of the whole tensor, if the collective is a ring's or
goes straight."""


def sent_by(call: Call) -> float:
    """Bytes that this rank sends to others in a call. Raises `KeyError` for an operation not in
    `TIMES_SENT`."""
    if call.method in MESSAGES:
        return sum(tensor.nbytes for tensor in call.inputs)
    # uneven: all rows but those that stay here
    if call.name == "all_to_all_single" and (splits := call.args[3]):
        [rows], own = call.inputs, call.ranks.index(dist.get_rank())
        return rows.nbytes * (1 - splits[own] / max(1, len(rows)))
    whole = max(sum(tensor.nbytes for tensor in tensors) for tensors in (call.inputs, call.outputs))
    return TIMES_SENT[call.name] * whole * (len(call.ranks) - 1) / len(call.ranks)


class Traffic(Observer):
    """Counts calls, by operation, and the bytes that this rank sends in them."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.sent = 0.0

    def begun(self, call: Call) -> None:
        self.calls[call.name] += 1
        self.sent += sent_by(call)


class SlowLink(Observer):
    """Lets no call that blocks end earlier than it would over a link of `gbit` 10^9 bits per
    second."""

    def __init__(self, gbit: float) -> None:
        self.seconds_per_byte, self.ends = 8e-9 / gbit, dict[int, float]()

    def begun(self, call: Call) -> None:
        self.ends[call.number] = time.monotonic() + sent_by(call) * self.seconds_per_byte

    def done(self, calls: Sequence[Call]) -> None:
        time.sleep(max(0.0, max(self.ends.pop(call.number) for call in calls) - time.monotonic()))
