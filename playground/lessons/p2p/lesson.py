"""Point to point: one rank sends a tensor, and another rank receives it.

Each function below sends in a different way. It returns a tensor with the number that this rank has
afterwards. Its table shows the number before and after, on each of three ranks. All functions have
the same arguments: rank and world size. If ranks start with different numbers, rank r has 10 + r.
The library that carries the messages is the backend: gloo between CPUs, nccl between GPUs.

    python -m playground p2p -n 3
    torchrun --nproc-per-node 3 lesson.py

    Rank 0 has data 1.0 after blocking, expected 1.0
    Rank 1 has data 1.0 after blocking, expected 1.0
    Rank 2 has data 0.0 after blocking, expected 0.0
    …
    Rank 0: largest difference from the expected data 0.0

Source: https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication
"""

import torch
import torch.distributed as dist

PARCEL = 7  # a tag: recv(tag=7) takes only a message that was sent with tag=7
LETTER = 8  # another tag


def blocking(rank, size):
    """Rank 0 adds 1 to its tensor and sends it to rank 1. Other ranks do nothing.

    send returns when its tensor may be changed, and recv when its tensor is filled.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 0.0    | 1.0   |
    | 1    | 0.0    | 1.0   |
    | 2    | 0.0    | 0.0   |
    """
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    return tensor


def immediate(rank, size):
    """The same with isend and irecv, which return a request at once, before the data has moved.

    The rank may compute before it calls wait(). Until wait() returns, the sender must not change
    its tensor, and the receiver must not read or change its tensor.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 0.0    | 1.0   |
    | 1    | 0.0    | 1.0   |
    | 2    | 0.0    | 0.0   |
    """
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        request = dist.isend(tensor, dst=1)
        # here the rank may compute something else
        request.wait()
    elif rank == 1:
        request = dist.irecv(tensor, src=0)
        # here the rank may compute, too
        request.wait()
    return tensor


def exchange(rank, size):
    """Every rank sends its number to the right, and receives its left neighbour's number.

    With send instead of isend, every rank would wait until its right neighbour calls recv, and no
    rank would reach its own recv.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 10.0   | 12.0  |
    | 1    | 11.0   | 10.0  |
    | 2    | 12.0   | 11.0  |
    """
    number, received = torch.tensor([10.0 + rank]), torch.zeros(1)
    left, right = (rank - 1) % size, (rank + 1) % size
    sending = dist.isend(number, dst=right)
    receiving = dist.irecv(received, src=left)
    sending.wait()
    receiving.wait()
    return received


def batch(rank, size):
    """The same exchange as a batch, whose messages start together.

    On nccl, a rank may have to finish its send before it starts to receive. So exchange may hang,
    and a batch cannot.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 10.0   | 12.0  |
    | 1    | 11.0   | 10.0  |
    | 2    | 12.0   | 11.0  |
    """
    number, received = torch.tensor([10.0 + rank]), torch.zeros(1)
    left, right = (rank - 1) % size, (rank + 1) % size
    operations = [dist.P2POp(dist.isend, number, right), dist.P2POp(dist.irecv, received, left)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return received


def ring(rank, size):
    """A token visits all ranks, and each adds 1 to it. It comes back to rank 0 with the world size.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 0.0    | 3.0   |
    | 1    | 0.0    | 2.0   |
    | 2    | 0.0    | 3.0   |
    """
    token = torch.zeros(1)
    left, right = (rank - 1) % size, (rank + 1) % size
    if rank == 0:  # one rank sends first: if all received first, no rank would ever send
        token += 1
        dist.send(token, dst=right)
        dist.recv(token, src=left)
    else:
        dist.recv(token, src=left)
        token += 1
        dist.send(token, dst=right)
    return token


def any_source(rank, size):
    """Rank 0 takes the numbers of the other ranks as they arrive, and sends each back doubled.

    Without src, recv takes a message from any rank, and returns the rank of the sender.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 10.0   | 10.0  |
    | 1    | 11.0   | 22.0  |
    | 2    | 12.0   | 24.0  |
    """
    number, received = torch.tensor([10.0 + rank]), torch.zeros(1)
    if rank == 0:
        for _ in range(size - 1):
            sender = dist.recv(received)
            dist.send(2 * received, dst=sender)
    else:
        dist.send(number, dst=0)
        dist.recv(number, src=0)
    return number


def tags(rank, size):
    """Rank 0 sends a parcel, 1.0, and then a letter, 5.0. Rank 1 receives the letter first.

    Rank 1 returns first - second: 5 - 1 = 4. Without tags the parcel is first: 1 - 5 = -4.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 0.0    | 0.0   |
    | 1    | 0.0    | 4.0   |
    | 2    | 0.0    | 0.0   |
    """
    parcel, letter = torch.tensor([1.0]), torch.tensor([5.0])
    first, second = torch.zeros(1), torch.zeros(1)
    if rank == 0:
        sending_parcel = dist.isend(parcel, dst=1, tag=PARCEL)
        sending_letter = dist.isend(letter, dst=1, tag=LETTER)
        sending_parcel.wait()
        sending_letter.wait()
    elif rank == 1:
        dist.recv(first, src=0, tag=LETTER)
        dist.recv(second, src=0, tag=PARCEL)
    return first - second


# On nccl, exchange may hang, any_source raises an error, and tags are ignored.
ONLY_ON_GLOO = exchange, any_source, tags


def run(rank, size):
    assert size > 1, "a message needs at least 2 ranks"
    left = (rank - 1) % size
    difference = 0.0
    for function, expected in (
        (blocking, 1.0 if rank < 2 else 0.0),
        (immediate, 1.0 if rank < 2 else 0.0),
        (exchange, 10.0 + left),
        (batch, 10.0 + left),
        (ring, float(size) if rank == 0 else rank + 1.0),  # rank 0 gets the token back
        (any_source, 10.0 if rank == 0 else 2 * (10.0 + rank)),
        (tags, 4.0 if rank == 1 else 0.0),
    ):
        if dist.get_backend() == "nccl" and function in ONLY_ON_GLOO:
            continue
        data = function(rank, size).item()
        difference = max(difference, abs(data - expected))
        name = function.__name__
        print(f"Rank {rank} has data {data:.1f} after {name}, expected {expected:.1f}")
    print(f"Rank {rank}: largest difference from the expected data {difference}")
    assert difference == 0, f"rank {rank} has other data than expected"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
