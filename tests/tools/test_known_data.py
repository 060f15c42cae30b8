"""The data that the benchmark checks results with: exact where it must be, and how far an average may be off."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from playground.runtime import launch
from playground.tools.bench import benchmark
from playground.tools.bench.benchmark import count_wrong, input_pattern, reduction_pattern, tolerance_of_average


def data_is_exact(rank: int, size: int) -> list[str]:
    """The types and operations for which what a reduction makes of the known data is not exact."""
    inexact = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            for ranks in (1, 2, 3, 8, 64):
                result = benchmark.reduction_pattern(ranks, dtype, op)
                if not torch.equal(result.to(dtype).to(result), result) or result.max() == result.min():
                    inexact.append(f"{dtype} {op} {ranks}")
    return inexact


def test_known_data_is_exact_in_every_type() -> None:
    assert launch(data_is_exact, 1) == [[]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 8])
def test_an_average_may_be_off_by_every_rounding_of_nccl_s(dtype: torch.dtype, size: int) -> None:
    """nccl multiplies by 1/N, rounded, before it adds."""
    given = [input_pattern(rank, size, dtype, torch.distributed.ReduceOp.AVG).to(dtype) for rank in range(size)]
    factor = torch.tensor(1 / size, dtype=dtype)
    average = given[0] * factor
    for other in given[1:]:
        average = average + other * factor
    right = reduction_pattern(size, dtype, torch.distributed.ReduceOp.AVG)
    tolerance = tolerance_of_average(size, dtype)
    assert count_wrong(average, right, tolerance=tolerance) == 0
    assert count_wrong(average * (1 + 4 * size * torch.finfo(dtype).eps), right, tolerance=tolerance) > 0
