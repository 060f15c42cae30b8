"""Two snapshots compared byte by byte: what differs is counted, and is no success."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from playground.runtime import PlaygroundError
from playground.survival.comparison import Comparison, last_snapshot
from playground.survival.snapshots import Snapshots, State, compare, count_differing, tensors_in


def save(folder: Path, value: float, size: int = 2) -> None:
    """One snapshot of `size` ranks, of step 7."""
    for rank in range(size):
        with Snapshots(folder, {"lr": 1}, rank=rank, size=size) as snapshots:
            snapshots.save(7, State(shared={"weight": torch.ones(4)}, own={"total": torch.tensor([value, 2.0])}))


def test_snapshots_of_all_ranks_are_compared(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("same", 1.0), ("other", -1.0)):
        save(tmp_path / name, value)
    one, same, other = (last_snapshot(tmp_path / name) for name in ("one", "same", "other"))
    assert compare(0, 1, one, same) == Comparison(tensors=4, nbytes=48, differing=0)
    assert compare(0, 1, one, other) == Comparison(tensors=4, nbytes=48, differing=2)  # a sign each


def test_snapshots_of_other_numbers_of_ranks_are_not_the_same(tmp_path: Path) -> None:
    save(tmp_path / "one", 1.0)
    save(tmp_path / "other", 1.0, size=1)
    with pytest.raises(ValueError, match="shorter"):
        compare(0, 1, last_snapshot(tmp_path / "one"), last_snapshot(tmp_path / "other"))


def test_an_end_that_is_not_whole_is_none(tmp_path: Path) -> None:
    with pytest.raises(PlaygroundError, match="holds no snapshot"):
        last_snapshot(tmp_path)
    save(tmp_path, 1.0)
    next(iter(tmp_path.glob("step-*/rank-1.*"))).unlink()
    with pytest.raises(PlaygroundError, match="of step 7, is "):
        last_snapshot(tmp_path)


def test_bytes_that_differ_are_no_success() -> None:
    Comparison(tensors=1, nbytes=4, differing=0).check()
    with pytest.raises(PlaygroundError, match="3 of 4 bytes differ"):
        Comparison(tensors=1, nbytes=4, differing=3).check()


def test_every_tensor_is_compared() -> None:
    state = {"a": torch.ones(2), "b": [{"c": torch.zeros(1)}, 3, "d", (torch.ones(1),)]}
    assert [tensor.tolist() for tensor in tensors_in(state)] == [[1.0, 1.0], [0.0], [1.0]]


@given(st.lists(st.integers(0, 255), min_size=1, max_size=20), st.data())
def test_bytes_are_counted(values: list[int], data: st.DataObject) -> None:
    others = data.draw(st.lists(st.integers(0, 255), min_size=len(values), max_size=len(values)))
    one, other = (torch.tensor(each, dtype=torch.uint8) for each in (values, others))
    assert count_differing(one, other) == sum(a != b for a, b in zip(values, others, strict=True))


def test_what_has_another_shape_or_type_differs_throughout() -> None:
    assert count_differing(torch.ones(2, 2).t(), torch.ones(2, 2)) == 0
    assert count_differing(torch.ones(4), torch.ones(2, 2)) == 16
    assert count_differing(torch.ones(4), torch.ones(4, dtype=torch.int32)) == 16
    assert count_differing(torch.tensor([0.0]), torch.tensor([-0.0])) == 1
    assert count_differing(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == 0
