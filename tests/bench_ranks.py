"""What tests of the benchmark let ranks do: the benchmark itself, with something broken in it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import ALGORITHMS
from playground.measure import bench, known
from playground.measure.plan import Plan


def forgetful(tensor: torch.Tensor, op: Any) -> None:
    """An all-reduce that leaves the last element as it was."""
    last = tensor[-1].clone()
    dist.all_reduce(tensor, op=op)
    tensor[-1] = last


def with_a_wrong_ring(rank: int, size: int, plan: Plan) -> None:
    ALGORITHMS["ring"] = forgetful  # type: ignore[assignment]
    bench.run(rank, size, plan)


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("ProcessGroup does not support broadcast")


def with_a_backend_that_refuses(rank: int, size: int, plan: Plan) -> None:
    dist.broadcast = refuse
    bench.run(rank, size, plan)


def with_different_plans(rank: int, size: int, *plans: Plan) -> None:
    bench.run(rank, size, plans[rank])


def data_is_exact(rank: int, size: int) -> list[str]:
    """The types and operations for which what a reduction makes of the known data is not exact."""
    inexact = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            for ranks in (1, 2, 3, 8, 64):
                result = known.reduced(ranks, dtype, op)
                if not torch.equal(result.to(dtype).to(result), result) or result.max() == result.min():
                    inexact.append(f"{dtype} {op} {ranks}")
    return inexact
