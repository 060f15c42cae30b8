"""What is told of replicas, and of the largest difference between them."""

from __future__ import annotations

import math

import pytest
import torch

from playground.training.replicas import max_abs_diff


@pytest.mark.parametrize(
    ("one", "other", "largest"),
    [
        ([1.0, -2.0], [1.5, 1.0], 3.0),
        ([1.0, math.nan], [1.0, 1.0], math.inf),
        ([math.inf, 0.0], [math.inf, 0.0], math.inf),
        ([-math.inf, 0.0], [0.0, 0.0], math.inf),
    ],
)
def test_a_difference_never_hides_what_is_no_finite_number(
    one: list[float], other: list[float], largest: float
) -> None:
    assert max_abs_diff(torch.tensor(one), torch.tensor(other)) == largest
