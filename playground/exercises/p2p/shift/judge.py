"""Requests: between a call and its wait(), a tensor belongs to the backend."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.exercise import Exercise, Mistake

COPY = "    tensor.copy_(arrived)\n"
EXERCISE = Exercise(
    worlds=(2, 3, 5, 4),
    mistakes=(
        Mistake(
            "read before wait",
            {
                COPY: "",
                "    receiving.wait()\n": "    arrived = arrived.clone()\n    receiving.wait()\n",
                "    sending.wait()\n": f"    sending.wait()\n{COPY}",
            },
            "irecv returns before anything has arrived",
        ),
        Mistake(
            "written before wait",
            {COPY: "", "    sending.wait()\n": f"{COPY}    sending.wait()\n"},
            "isend returns before the tensor has been sent",
        ),
        Mistake("no wait", {"    sending.wait()\n": ""}, "nothing says when the message has been sent"),
        Mistake(
            "shifted the other way", {"irecv(arrived, left)": "irecv(arrived, right)", "tensor, right": "tensor, left"}
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    for place, (about, give) in enumerate(inputs()):
        tensor = give(rank)
        yield Case(about, (tensor,), held=tensor, expected=give((rank - 1) % size), delay=0.02 * ((rank + place) % 2))
