from typing import Any

import torch
import torch.distributed as dist


def call(rank: int, size: int, arguments: list[int], calls: list[int], service: Any) -> list[int]:
    """Have rank 0 answer this rank's `arguments`; the answers, in their order. On rank 0, which has none, [].

    calls[r] is the number of calls that rank r makes. Rank 0's `service` answers in an order of its own:
    service.submit(ticket, argument) takes a request, and returns the list of all (ticket, answer) that are ready now.
    service.close() returns the list of those that are left. A ticket is whatever you choose; it comes back as it was.
    """
    # write this
    message = torch.empty(2, dtype=torch.int64)
    if rank > 0:
        requests = [dist.isend(torch.tensor(request), 0) for request in enumerate(arguments)]
        answers = [0] * len(arguments)
        for _ in arguments:
            dist.recv(message, 0)
            number, answer = message.tolist()
            answers[number] = answer
        for request in requests:
            request.wait()
        return answers

    def reply(ready: list[tuple[tuple[int, int], int]]) -> None:
        for (caller, number), answer in ready:
            dist.send(torch.tensor([number, answer]), caller)

    for source in range(1, size):
        for _ in range(calls[source]):
            dist.recv(message, source)
            number, argument = message.tolist()
            reply(service.submit((source, number), argument))
    reply(service.close())
    return []
    # until here
