"""The backend's own collectives, each called on the buffers of a benchmark."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from playground.tools.bench.workload import Buffers

# What torch 2.14 calls by other names than those before.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(buffers: Buffers, op: Any) -> None:
    dist.all_reduce(buffers.input, op=op)


def broadcast(buffers: Buffers, op: Any) -> None:
    dist.broadcast(buffers.input, src=0)


def reduce(buffers: Buffers, op: Any) -> None:
    dist.reduce(buffers.input, dst=0, op=op)


def all_gather(buffers: Buffers, op: Any) -> None:
    all_gather_single(buffers.output, buffers.input)


def reduce_scatter(buffers: Buffers, op: Any) -> None:
    reduce_scatter_single(buffers.output, buffers.input, op=op)


def all_to_all(buffers: Buffers, op: Any) -> None:
    dist.all_to_all_single(buffers.output, buffers.input)


def gather(buffers: Buffers, op: Any) -> None:
    dist.gather(buffers.input, buffers.output_pieces or None, dst=0)


def scatter(buffers: Buffers, op: Any) -> None:
    dist.scatter(buffers.output, buffers.input_pieces or None, src=0)
