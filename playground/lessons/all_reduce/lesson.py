"""All-reduce by hand: the ways to leave the same sum on every rank, and what each costs.

    python -m playground allreduce
    python -m playground allreduce --algorithm ring -n 3 --elements 6

Rank r starts with 10 to the power r in every element (with more than 16 ranks it begins again), so each digit of what a
rank holds says whose tensor is in it.
What is shown are the messages of the run itself, recorded as they are sent.
playground/algorithms/all_reduce.py has the algorithms, whole, from the first idea to the fast ones: begin with `ring`.
"""

from __future__ import annotations

import torch

from playground.algorithms.all_reduce import ring


def allreduce(send: torch.Tensor, recv: torch.Tensor) -> None:
    """The tutorial's function, but right, and in chunks: leave in `recv`, on every rank, the sum of all `send`s."""
    recv.copy_(send)
    ring(recv)


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
