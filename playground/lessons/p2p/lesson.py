"""Point to point: one rank sends a tensor, another receives it.

    torchrun --nproc-per-node 2 lesson.py
    python -m playground p2p

prints, among others,

    Rank 0 has data 1.0
    Rank 1 has data 1.0

`send` and `recv` block; `isend` and `irecv` return a request at once. Between the call and
`request.wait()` the tensor that is being sent must not be written, and the one that is being
received must not be read. The tables show the run with as many ranks as they have rows. Source:
https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication
"""

from __future__ import annotations

import torch
import torch.distributed as dist

PARCEL, LETTER = 1, 2  # tags: a receive takes only messages that carry the tag it names


def blocking(rank: int, size: int) -> dict[str, float]:
    """Rank 0 adds one and sends; rank 1, which has allocated the memory, receives. Any other rank
    has no part in it.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 0.0    | 1.0   |
    | 1    | 0.0    | 1.0   |
    | 2    | 0.0    | 0.0   |
    """
    tensor = torch.zeros(1)
    before = tensor.item()
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    return {"before": before, "after": tensor.item()}


def two_tensors(rank: int, size: int) -> dict[str, int]:
    """Rank 0 adds two and sends; rank 1 receives into a second tensor, and its own stays as it was.

    | rank | tensor | received |
    |------|--------|----------|
    | 0    | 2      | 0        |
    | 1    | 0      | 2        |
    | 2    | 0      | 0        |
    """
    tensor = torch.zeros(1, dtype=torch.int64)
    received = torch.zeros_like(tensor)
    if rank == 0:
        tensor += 2
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(received, src=0)
    return {"tensor": int(tensor), "received": int(received)}


def immediate(rank: int, size: int) -> dict[str, object]:
    """`blocking` with requests: both calls return at once, and only `wait()` makes the data safe to
    touch.

    | rank | before | started     | after |
    |------|--------|-------------|-------|
    | 0    | 0.0    | 'sending'   | 1.0   |
    | 1    | 0.0    | 'receiving' | 1.0   |
    | 2    | 0.0    | 'nothing'   | 0.0   |
    """
    tensor = torch.zeros(1)
    before = tensor.item()
    started = "nothing"
    request = None
    if rank == 0:
        tensor += 1
        request = dist.isend(tensor, dst=1)
        started = "sending"
    elif rank == 1:
        request = dist.irecv(tensor, src=0)
        started = "receiving"
    if request:
        request.wait()
    return {"before": before, "started": started, "after": tensor.item()}


def any_source(rank: int, size: int) -> dict[str, float]:
    """Receive from whoever sends: leave `src` out, and `recv` returns who it was.

    Each rank sends its number to the right neighbour, twice. The first is awaited from before
    anything is sent: a backend that cannot receive from anyone says so there, and no message is
    left behind.

    | rank | before | first | second | sender |
    |------|--------|-------|--------|--------|
    | 0    | 0.0    | 2.0   | 2.0    | 2      |
    | 1    | 1.0    | 0.0   | 0.0    | 0      |
    | 2    | 2.0    | 1.0   | 1.0    | 1      |
    """
    number = torch.full((1,), float(rank))
    first, second = torch.zeros_like(number), torch.zeros_like(number)
    awaited = dist.irecv(first)
    right = (rank + 1) % size
    sent = [dist.isend(number, right), dist.isend(number, right)]
    awaited.wait()
    sender = dist.recv(second)
    for request in sent:
        request.wait()
    return {
        "before": number.item(),
        "first": first.item(),
        "second": second.item(),
        "sender": sender,
    }


def tags(rank: int, size: int) -> dict[str, float]:
    """Messages may overtake each other if their tags differ.

    Each rank sends its number to the right neighbour, in a parcel and, tenfold, in a letter. The
    letter is awaited first although the parcel was sent first.

    | rank | before | parcel | letter |
    |------|--------|--------|--------|
    | 0    | 0.0    | 2.0    | 20.0   |
    | 1    | 1.0    | 0.0    | 0.0    |
    | 2    | 2.0    | 1.0    | 10.0   |
    """
    number = torch.full((1,), float(rank))
    parcel, letter = torch.zeros_like(number), torch.zeros_like(number)
    awaited = dist.irecv(letter, tag=LETTER)
    right = (rank + 1) % size
    sent = [
        dist.isend(number, right, tag=PARCEL),
        dist.isend(10 * number, right, tag=LETTER),
    ]
    awaited.wait()
    dist.recv(parcel, tag=PARCEL)
    for request in sent:
        request.wait()
    return {"before": number.item(), "parcel": parcel.item(), "letter": letter.item()}


def exchange(rank: int, size: int) -> dict[str, float]:
    """Two ranks swap values. Were both to `send` first, each could wait forever for the other's
    `recv`.

    A batch hands over sends and receives together, so that their order does not matter, on any
    backend. Ranks pair up as 0-1, 2-3, …; with an odd number of ranks the last one stays alone.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 0.0    | 1.0   |
    | 1    | 1.0    | 0.0   |
    | 2    | 2.0    | 2.0   |
    """
    mine = torch.full((1,), float(rank))
    theirs = mine.clone()
    partner = rank ^ 1
    if partner < size:
        batch = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
        for request in dist.batch_isend_irecv(batch):
            request.wait()
    return {"before": mine.item(), "after": theirs.item()}


def ring(rank: int, size: int) -> dict[str, float]:
    """A token goes round: each rank adds one and passes it on, so it comes home to rank 0 with the
    world size.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 0.0    | 3.0   |
    | 1    | 0.0    | 2.0   |
    | 2    | 0.0    | 3.0   |
    """
    token = torch.zeros(1)
    before = token.item()
    left, right = (rank - 1) % size, (rank + 1) % size
    if rank == 0:
        dist.send(token + 1, right)
        dist.recv(token, left)
    else:
        dist.recv(token, left)
        token += 1
        dist.send(token, right)
    return {"before": before, "after": token.item()}


def print_steps(rank: int, world_size: int) -> None:
    """Run every step, and print what it leaves on this rank."""
    for step in (blocking, two_tensors, immediate, any_source, tags, exchange, ring):
        print(f"Rank {rank}, {step.__name__}: {step(rank, world_size)}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print_steps(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
