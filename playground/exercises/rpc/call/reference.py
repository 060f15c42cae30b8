from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def call(
    rank: int,
    size: int,
    requests: list[tuple[str, int]],
    calls: list[int],
    functions: dict[str, Callable[[int], object]],
) -> list[object]:
    """Have rank 0 carry out this rank's requests. Returns the answers in their
    order, and on rank 0, which has no requests, [].

    requests: names of functions, and their arguments. calls[r]: the number of
    requests that rank r has. functions: those of rank 0; empty on the others.
    The answer to a request that fails is "NameOfTheError: its text".
    """
    # write this
    answers: list[object] = []
    for request in requests:
        message: list[Any] = [None]
        dist.send_object_list([request], 0)
        dist.recv_object_list(message, 0)
        answers += message
    for source in range(1, size if rank == 0 else 1):
        for _ in range(calls[source]):
            message = [None]
            dist.recv_object_list(message, source)
            name, argument = message[0]
            try:
                answer = functions[name](argument)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            dist.send_object_list([answer], source)
    return answers
    # until here
