"""A rank that waits for a worker of a DataLoader is known by its stack."""

from __future__ import annotations

import os

import pytest

from playground.explain.hang.workers import describe_worker, find_called

LOADER = "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
FETCH = "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py"


def frame(file: str, function: str) -> str:
    return f'  File "{file}", line 12, in {function}\n'


@pytest.mark.parametrize(
    ("stack", "said"),
    [
        ([frame("/usr/lib/python3.11/queue.py", "get"), frame(LOADER, "_try_get_data")], True),
        ([frame(LOADER, "_get_data"), frame("train.py", "main")], True),
        (
            [frame("train.py", "__getitem__"), frame(FETCH, "fetch"), frame(LOADER, "_next_data")],
            False,
        ),
        ([frame(LOADER, "__init__"), frame("train.py", "main")], False),
        ([frame("train.py", "main")], False),
        ([], False),
    ],
)
def test_a_rank_waits_for_a_worker_where_its_innermost_frame_of_torch_does(
    stack: list[str], said: bool
) -> None:
    """By a process that has no workers."""
    assert describe_worker(stack, os.getpid()) == "a DataLoader worker" * said


TORCH = "/venv/lib/python3.11/site-packages/torch/distributed"


@pytest.mark.parametrize(
    ("functions", "called"),
    [
        (
            ["all_gather", "wrapper", "_gather_state", "get_model_state_dict"],
            "get_model_state_dict",
        ),
        (["all_gather", "save", "inner_func", "wrapper"], "save"),
        (["all_reduce", "wrapper"], "all_reduce"),
        (["all_gather", "_call_impl"], ""),
        (["wrapper"], ""),
        ([], ""),
    ],
)
def test_the_function_of_torch_is_that_which_the_program_calls(
    functions: list[str], called: str
) -> None:
    stack = [frame(f"{TORCH}/some.py", function) for function in functions]
    assert find_called([*stack, frame("train.py", "main"), frame(FETCH, "run")]) == called


def test_a_function_that_is_not_torch_s_is_not_named() -> None:
    stack = [frame("/venv/lib/python3.11/site-packages/accelerate/a.py", "gather")]
    assert find_called([*stack, frame("train.py", "main")]) == ""
