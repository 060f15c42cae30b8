"""The whole ring: a reduce-scatter, then the sums go round once more. No rank sends two whole tensors."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.exercise import GATHERS, Exercise, Mistake

WHOLE = """\
    passed_on, arrived = tensor.clone(), torch.empty_like(tensor)
    for _ in range(size - 1):
        request = dist.isend(passed_on, (rank + 1) % size)
        dist.recv(arrived, (rank - 1) % size)
        request.wait()
        tensor += arrived
        passed_on, arrived = arrived, passed_on
"""
FIRST_HALF = "    reduce_scatter(rank, size, tensor)\n    chunks = tensor.tensor_split(size)\n"
SECOND_HALF = """\
    for step in range(size - 1):
        request = dist.isend(chunks[(rank - step) % size], (rank + 1) % size)
        dist.recv(chunks[(rank - step - 1) % size], (rank - 1) % size)
        request.wait()
"""
EXERCISE = Exercise(
    forbidden=("all_reduce", "reduce_scatter", "reduce_scatter_tensor", *GATHERS),
    builds_on=("reduce-scatter",),
    mistakes=(
        Mistake(
            "the whole tensor at each hop",
            {FIRST_HALF: WHOLE, SECOND_HALF: ""},
            "the sum is right, but no byte is saved",
        ),
        Mistake(
            "loses the remainder",
            {FIRST_HALF: f"    tensor = tensor[: len(tensor) // size * size]\n{FIRST_HALF}"},
            "what is left over when the elements are shared out is never summed",
        ),
        Mistake("stops after the reduce-scatter", {SECOND_HALF: ""}, "each rank has the sum of its own chunk only"),
        Mistake(
            "passes on its own chunk only",
            {"isend(chunks[(rank - step) % size]": "isend(chunks[rank]"},
            "from step 1 on, the chunk that has just arrived is due",
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs():
        tensor, total = give(rank), sum(give(other) for other in range(size))
        yield Case(about, (tensor,), held=tensor, expected=total, most=2 * (size - 1) * -(-len(tensor) // size))
