"""What tests of the benchmark let ranks do: the benchmark itself, with something broken in it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import load_algorithm
from playground.tools.bench import benchmark, known_data, workload
from playground.tools.bench.settings import BenchSettings


def forgetful_all_reduce(tensor: torch.Tensor, op: Any) -> None:
    """An all-reduce that leaves the last element as it was."""
    last = tensor[-1].clone()
    dist.all_reduce(tensor, op=op)
    tensor[-1] = last


def forgetful_all_gather(output: torch.Tensor, input: torch.Tensor) -> None:
    """An all-gather that leaves the last element as it was."""
    last = output[-1].clone()
    dist.all_gather_into_tensor(output, input)
    output[-1] = last


def shifted_reduce_scatter(output: torch.Tensor, input: torch.Tensor, op: Any) -> None:
    """A reduce-scatter in which each rank gets what is its neighbour's."""
    dist.reduce_scatter_tensor(output, input.roll(output.numel()), op=op)


WRONG: dict[str, Any] = {
    "all_reduce": forgetful_all_reduce,
    "all_gather": forgetful_all_gather,
    "reduce_scatter": shifted_reduce_scatter,
}


def wrong_ring(collective: str, name: str) -> Any:
    """Instead of `load_algorithm`: what it loads, but a broken ring."""
    return WRONG[collective] if name == "ring" else load_algorithm(collective, name)


def run_with_a_wrong_ring(rank: int, size: int, settings: BenchSettings) -> None:
    workload.load_algorithm = wrong_ring  # type: ignore[assignment, attr-defined]
    benchmark.run(rank, size, settings)


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("ProcessGroup does not support broadcast")


def run_with_a_backend_that_refuses(rank: int, size: int, settings: BenchSettings) -> None:
    dist.broadcast = refuse
    benchmark.run(rank, size, settings)


def run_with_different_settings(rank: int, size: int, *settings: BenchSettings) -> None:
    benchmark.run(rank, size, settings[rank])


def data_is_exact(rank: int, size: int) -> list[str]:
    """The types and operations for which what a reduction makes of the known data is not exact."""
    inexact = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            for ranks in (1, 2, 3, 8, 64):
                result = known_data.reduction_pattern(ranks, dtype, op)
                if not torch.equal(result.to(dtype).to(result), result) or result.max() == result.min():
                    inexact.append(f"{dtype} {op} {ranks}")
    return inexact
