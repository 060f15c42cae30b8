"""The interface of a backend: its words for what it does not support are told from other errors."""

from __future__ import annotations

import pytest

from playground.world.backends import BACKENDS


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        # torch 2.13 and 2.14, 2.15
        ("nccl", "monitored_barrier is only implemented for GLOO backend."),
        ("nccl", "monitored_barrier requires a group with a CPU-capable backend (e.g. GLOO)."),
        ("nccl", "ProcessGroupNCCL does not support recvAnysource"),
        ("nccl", "Unhandled ReduceOp"),
        ("nccl", "Input tensor data type is not supported for NCCL process group: ComplexHalf"),
        ("nccl", "Unsupported Float8 type for NCCL reduction"),
        ("gloo", "Cannot use ReduceOp.AVG with Gloo"),
        ("gloo", "result type Float can't be cast to the desired output type Long"),
        ("gloo", "Invalid data type"),
    ],
)
def test_refusals_are_recognised(backend: str, words: str) -> None:
    assert (
        BACKENDS[backend].refusal(RuntimeError(f"{words}\nException raised from somewhere"))
        == words
    )


def test_other_errors_are_not_taken_for_refusals() -> None:
    words = (
        "",
        "NCCL error: unhandled system error",
        "the system failed\nwhat is not supported is another matter",
    )
    for error in (*map(RuntimeError, words), KeyError("x")):
        assert not any(backend.refusal(error) for backend in BACKENDS.values())
