"""What every rank had before and after a step, and what a step may return."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from playground.console.rendering import render
from playground.console.steps import step_texts
from playground.runtime import PlaygroundError
from playground.runtime.rank.steps import check_outcome


@dataclass(frozen=True)
class Sent:
    before: int
    sent: int


def lines_of(returned: list[object]) -> list[str]:
    return render(step_texts("ring", "A token goes round.", returned), 80).splitlines()


def test_a_row_per_rank() -> None:
    lines = lines_of([{"before": 0.0, "after": 1.0}, {"before": [1, 2], "after": None}])
    assert lines == [
        "ring: A token goes round.",
        "  rank  before  after",
        "     0  0.0     1.0",
        "     1  [1, 2]  -",
    ]


def test_a_dataclass_is_shown_by_its_fields() -> None:
    assert lines_of([Sent(1, 8), Sent(2, 16)])[1:] == [
        "  rank  before  sent",
        "     0  1       8",
        "     1  2       16",
    ]


def test_ranks_that_return_different_names_are_shown_all_the_same() -> None:
    lines = lines_of([{"root": 1}, {"leaf": 2}])
    assert lines[1:] == ["  rank  root  leaf", "     0  1     -", "     1  -     2"]


def test_a_table_that_is_the_same_everywhere_stands_below() -> None:
    value = {"SUM": 3, "MAX": 2}
    assert lines_of([{"before": 1, "after": value}, {"before": 2, "after": value}])[-3:] == [
        "  after, on every rank:",
        "    SUM  3",
        "    MAX  2",
    ]


def test_what_several_things_have_is_one_table() -> None:
    ways = {"all": {"loss": 0.25, "kB": 8}, "H = 8": {"loss": 0.5, "error": None}}
    assert lines_of([{"ways": ways, "none": {}}] * 2)[1:] == [
        "  rank  none",
        "     0  {}",
        "     1  {}",
        "  ways   loss  kB  error",
        "  all    0.25   8      -",
        "  H = 8   0.5   -      -",
    ]


def test_what_the_backend_refuses_is_said_once() -> None:
    assert lines_of([{"refused": "no AVG"}] * 2)[1:] == ["  the backend refuses: no AVG"]


@pytest.mark.parametrize(
    ("outcome", "what"),
    [
        (None, "returned nothing"),
        (torch.zeros(2), "returned a Tensor"),
        ({"before": 0, "after": torch.zeros(1)}, "returned a Tensor in 'after'"),
        ({"all": [torch.zeros(1)]}, "returned a Tensor in 'all'"),
    ],
)
def test_what_cannot_be_shown_is_answered_in_one_line(outcome: object, what: str) -> None:
    with pytest.raises(PlaygroundError) as caught:
        check_outcome("ring", outcome)
    assert str(caught.value).startswith(f"step ring {what}: return plain data, e.g. {{'before': ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("outcome", [{"before": 0}, {}, Sent(1, 2), {"refused": "no"}])
def test_plain_data_passes(outcome: object) -> None:
    assert check_outcome("ring", outcome) is outcome
