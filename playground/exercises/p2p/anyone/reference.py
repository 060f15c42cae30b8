import torch
import torch.distributed as dist

PARCEL, LETTER = 1, 2


def anyone(
    rank: int,
    size: int,
    parcel: torch.Tensor,
    letter: torch.Tensor,
) -> list[list[torch.Tensor]] | None:
    """On rank 0, all parcels and all letters; None on the others.

    Each list is in the order of the ranks, rank 0's own included.
    """
    # write this
    if rank > 0:
        dist.send(parcel, 0, tag=PARCEL)
        dist.send(letter, 0, tag=LETTER)
        return None
    parcels, letters = [parcel] * size, [letter] * size
    for _ in range(1, size):
        arrived = torch.empty_like(parcel)
        parcels[dist.recv(arrived, tag=PARCEL)] = arrived
    for _ in range(1, size):
        arrived = torch.empty_like(letter)
        letters[dist.recv(arrived, tag=LETTER)] = arrived
    return [parcels, letters]
    # until here
