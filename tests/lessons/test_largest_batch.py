"""The largest batch that fits: against trying every one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from playground.lessons.data_parallel.memory import GROWTH, largest_batch
from playground.runtime import UsageError

MODEL = {"parameters": 4000, "gradients": 4000}
LIMIT = 600


def stairs(fixed: int, per_chunk: int, per_sample: int, devices: int) -> Callable[[int], int]:
    """What the fullest of several devices holds: a chunk, and something for every sample."""
    return lambda batch: fixed + per_chunk * -(-batch // devices) + per_sample * batch


@given(
    st.builds(stairs, st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 10**3), st.integers(1, 8)),
    st.integers(0, 10**6), st.integers(1, 9), st.integers(9, LIMIT),
)  # fmt: skip
def test_it_is_the_last_that_fits(peak: Callable[[int], int], room: int, smallest: int, limit: int) -> None:
    probes: list[int] = []

    def take_step(batch: int) -> int:
        probes.append(batch)
        return peak(batch)

    cap = peak(smallest) + room
    found = largest_batch(take_step, cap, model=MODEL, limit=limit, smallest=smallest)
    assert found == max(batch for batch in range(smallest, limit + 1) if peak(batch) <= cap)
    assert len(probes) == len(set(probes)) <= 20
    assert all(batch <= GROWTH * found for batch in probes)


def test_along_a_line_few_steps_are_taken() -> None:
    probes: list[int] = []

    def take_step(batch: int) -> int:
        probes.append(batch)
        return 8000 + 70 * batch

    assert largest_batch(take_step, 50_000, model=MODEL, limit=100_000) == 600
    assert probes == [1, 4, 16, 64, 256, 600, 601]


def test_a_peak_that_goes_up_and_down_ends_where_the_next_does_not_fit() -> None:
    peaks = [0, 5, 4, 9, 3, 8, 8, 30, 2, 40]
    found = largest_batch(lambda batch: peaks[batch], 8, model=MODEL, limit=9)
    assert peaks[found] <= 8 < peaks[found + 1]


def test_too_small_a_cap_is_told_what_the_model_needs() -> None:
    with pytest.raises(UsageError) as caught:
        largest_batch(stairs(8000, 0, 70, 1), 8050, model=MODEL, limit=10)
    assert str(caught.value) == (
        "a memory cap of 8,050 bytes is too small: the model alone needs 8,000 (parameters 4,000, gradients 4,000), "
        "with one sample 8,070: allow at least as many"
    )
    with pytest.raises(UsageError, match="with 3 samples 8,210"):
        largest_batch(stairs(8000, 0, 70, 1), 8050, model=MODEL, limit=10, smallest=3)
