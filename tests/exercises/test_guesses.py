"""What is guessed of a failure: nothing that another rank or another value contradicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from playground.exercises.exercise import RETURNED, Place
from playground.exercises.guess import (
    NOT_SENT,
    guess_by_places,
    guess_by_prediction,
    guess_by_values,
)
from playground.exercises.mistakes import find_rebound
from playground.exercises.observation import (
    OWN,
    RESULT,
    Leaf,
    Observation,
    find_difference,
)

SUM = "the sum in place of the mean"
SHARE = "divided by the number of ranks once too often"


def leaf(where: str, *values: object, kind: str = "float32") -> Leaf:
    return Leaf(where, kind, (len(values),), values)


def number(where: str, value: object) -> Leaf:
    return Leaf(where, type(value).__name__, (), (value,))


def observe(*pairs: tuple[Leaf, Leaf], is_coded: bool = False) -> Observation:
    """A rank that holds the first of each pair, where the second is due."""
    return Observation(
        about="a case",
        held=tuple(mine for mine, _ in pairs), expected=tuple(due for _, due in pairs),
        is_coded=is_coded, sent=(), received=(0, 0), most=None, moved=0, most_moved=None,
        problems=(), printed="",
    )  # fmt: skip


def guess(*ranks: Observation) -> str:
    return guess_by_values(dict(enumerate(ranks)))


def grads(*values: float) -> tuple[tuple[Leaf, Leaf], ...]:
    """Gradients of one element, where 2.0 is due in each."""
    return tuple(
        (leaf(f"grad[{at}]", each), leaf(f"grad[{at}]", 2.0)) for at, each in enumerate(values)
    )


def test_a_ratio_is_on_all_ranks() -> None:
    right, half = (observe((number(RESULT, each), number(RESULT, 0.8))) for each in (0.8, 0.4))
    assert guess(half, half) == SHARE
    assert guess(right, half) == "only rank 0 has the right result"
    assert guess(right, right, half) == ""


def test_of_a_truth_and_of_nothing_no_more_is_guessed_than_the_failure_says() -> None:
    assert guess(*[observe((number(RESULT, False), number(RESULT, True)))] * 2) == ""
    assert guess(*[observe((number("grad", 1.0), number("grad", None)))] * 2) == ""


def test_what_is_right_on_one_rank_is_told_where_it_is_due_on_all() -> None:
    right, wrong = (observe((number(RESULT, each), number(RESULT, 7.0))) for each in (7.0, 3.0))
    other = observe((number(RESULT, 3.0), number(RESULT, 9.0)))
    assert guess(wrong, right, wrong) == "only rank 1 has the right result"
    assert guess(right, other) == ""


def test_the_number_of_ranks_is_guessed_of_where_it_is_written_down_or_too_often_used() -> None:
    fixed, whole, count = (
        observe((leaf("grad", 55.5), leaf("grad", 37.0))),
        observe((leaf("sum", 37, kind="int64"), leaf("sum", 111, kind="int64"))),
        observe((number("size", 1), number("size", 3))),
    )
    assert [guess(each, each, each) for each in (fixed, whole, count)] == [
        "divided by 2, and not by the number of ranks",
        "divided by the number of ranks",
        "",
    ]


def test_a_ratio_is_in_all_elements_and_in_all_items_of_a_list() -> None:
    assert guess(*[observe(*grads(4.0, 4.0))] * 2) == SUM
    assert guess(*[observe(*grads(2.0, 4.0))] * 2) == ""
    kept = leaf("parameter[0]", 1.0)
    assert guess(*[observe(*grads(4.0, 4.0), (kept, kept))] * 2) == SUM


def test_of_a_prediction_no_guess_is_about_ranks() -> None:
    twice = observe(*((number(name, 8), number(name, 4)) for name in ("sent", "held")))
    zero = observe((number("sent", 0), number("sent", 4)))
    one_off = observe((number("sent", 9), number("sent", 8)))
    text = observe((number("sent", "8"), number("sent", 8)))
    assert [guess_by_prediction({0: each}) for each in (twice, zero, one_off, text)] == [
        "",
        "",
        "one too many",
        "str in the place of int",
    ]


def test_a_number_is_not_guessed_of_where_words_are_wrong_too() -> None:
    zeros, words = (leaf("subtracted", 0.0), leaf("subtracted", 3.0)), ("no step", "one step")
    said = number("step", words[0]), number("step", words[1])
    assert guess(observe(zeros), observe(zeros)) == "nothing is written there: it holds zeros"
    assert guess(observe(zeros, said), observe(zeros, said)) == ""


@pytest.mark.parametrize(
    ("held", "due", "told"),
    [(5, 4, "one too many"), (3, 4, "one too few"), (1, 2, ""), (2, 1, "")],
)
def test_one_too_many_is_not_guessed_of_small_numbers(held: int, due: int, told: str) -> None:
    one = observe((number("size", held), number("size", due)))
    assert guess(one, one) == ("counted twice" if held == 2 * due else told)


def test_one_too_many_is_guessed_of_small_numbers_that_are_all_one_off() -> None:
    pairs = [(number(f"ranks[{at}]", at + 1), number(f"ranks[{at}]", at)) for at in range(2)]
    node = number("node", 0)
    assert guess(observe(*pairs)) == "one too many"
    size = number("size", 1), number("size", 2)
    assert guess(observe((node, node), size), observe((node, number("node", 1)), size)) == ""


def test_a_result_of_its_own_is_on_each_rank() -> None:
    one, other, right = (
        observe((leaf(RESULT, each), leaf(RESULT, 7.0))) for each in (1.0, 3.0, 7.0)
    )
    assert guess(one, other) == "each rank has a result of its own"
    assert guess(right, other) == "only rank 0 has the right result"
    assert guess(right, right, other) == ""


def test_a_tensor_is_told_from_a_number() -> None:
    tensor = Leaf(RESULT, "float32", (), (0.8,))
    one = observe((tensor, number(RESULT, 0.8)))
    assert guess(one, one) == "a tensor in the place of a number: `.item()`"
    text = observe((number(RESULT, "2"), number(RESULT, 2)))
    assert guess(text, text) == "str in the place of int"


def test_own_values_come_back_also_where_the_own_tensor_was_changed_on_the_way() -> None:
    ones, tens = leaf(RESULT, 1, kind="int64"), leaf(RESULT, 10, kind="int64")
    own = [replace(each, where=OWN) for each in (ones, tens)]
    first = replace(
        observe((ones, tens), (own[0], own[0]), is_coded=True), given=(ones,), received=(0, 1)
    )
    second = replace(
        observe((ones, ones), (own[0], own[1]), is_coded=True), given=(tens,), received=(1, 0)
    )
    assert guess(first, second) == (
        "its own values came back: rank 1 sent what it had just received"
    )


def test_values_of_another_rank_are_told() -> None:
    one, other = (
        observe((leaf("", mine, kind="int64"), leaf("", due, kind="int64")), is_coded=True)
        for mine, due in ((1, 10), (100, 1))
    )
    assert guess(one, other, other) == "one rank's values are where another rank's should be"


def test_a_value_where_the_same_is_due_on_all_is_each_rank_s_own_whatever_else_there_is() -> None:
    ranks = [
        observe((leaf("grad[0]", own), leaf("grad[0]", 5.5)), (leaf("start", own),) * 2)
        for own in (1.0, 10.0)
    ]
    assert guess(*ranks) == "each rank has a result of its own"


def test_ranks_that_all_wait_have_sent_first_or_not() -> None:
    receive, send = ({at: Place(name, 1 - at) for at in range(2)} for name in ("recv", "send"))
    assert guess_by_places(receive, 2) == "all receive first"
    assert guess_by_places(receive, 2, False) == NOT_SENT
    assert guess_by_places(send, 2) == "all send first"
    assert guess_by_places(send, 2, False) == "all ranks wait in send, and none receives"


def test_a_message_without_its_other_end_is_told() -> None:
    at = {0: Place("send", 2), 1: Place("recv", 0), 2: RETURNED}
    assert guess_by_places(at, 3) == "rank 0 sends to rank 2, which does not receive"
    at = {0: RETURNED, 1: Place("broadcast"), 2: Place("recv", 0)}
    assert guess_by_places(at, 3) == "rank 2 waits for rank 0, which does not send"
    at = {0: RETURNED, 1: Place("broadcast"), 2: Place("broadcast")}
    assert guess_by_places(at, 3) == "a rank leaves out a call that the others make"


def test_a_slice_of_a_parameter_is_no_other_tensor() -> None:
    assert find_rebound("def f(rank, tensor):\n    tensor = tensor[1:]\n", "f") == ""
    assert find_rebound("def f(rank, tensor):\n    tensor = other[1:]\n", "f") == "tensor"


def test_a_value_too_many_is_told_by_its_place() -> None:
    last, more, calls = (
        number(where, 3) for where in ("epoch 1, sample 1", "epoch 1, sample 2", "calls")
    )
    found = find_difference([last, more, calls], [last, calls])
    assert found
    assert (found.where, found.words) == ("epoch 1, sample 2", "should not be there")


def test_a_ratio_is_in_all_samples_of_an_epoch() -> None:
    samples = [number(f"epoch 1, sample {at}", 3) for at in range(2)]
    twice = number("epoch 1, sample 1", 6)
    assert guess(observe((samples[0], samples[0]), (twice, samples[1]))) == ""
    assert guess(observe((twice, samples[1]))) == "counted twice"
