"""Bytes that a rank sends, counted."""

from __future__ import annotations

import re
from collections import Counter

import torch.distributed as dist

from playground.algorithms.cost_model import times_sent
from playground.runtime.tap import MESSAGES, Call, Observer

OF_ONE_TENSOR = re.compile(r"(_into)?_tensor$|_single$")
"""The end of a function's name, which does not change what is sent."""


def sent_by(call: Call) -> float:
    """Bytes that this rank sends to others in a call. Raises `KeyError` for an operation not in
    `cost_model.TIMES_SENT`."""
    if call.method in MESSAGES:
        return sum(tensor.nbytes for tensor in call.inputs)
    # uneven: all rows but those that stay here
    if call.name == "all_to_all_single" and (splits := call.args[3]):
        [rows], own = call.inputs, call.ranks.index(dist.get_rank())
        return rows.nbytes * (1 - splits[own] / max(1, len(rows)))
    whole = max(sum(tensor.nbytes for tensor in tensors) for tensors in (call.inputs, call.outputs))
    return times_sent(len(call.ranks), OF_ONE_TENSOR.sub("", call.name)) * whole


class Traffic(Observer):
    """Counts calls, by operation, and the bytes that this rank sends in them."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.sent = 0.0

    def begun(self, call: Call) -> None:
        self.calls[call.name] += 1
        self.sent += sent_by(call)
