from torch.utils.data import DistributedSampler


def epochs(
    rank: int,
    size: int,
    samples: int,
    seed: int,
    first: int,
    count: int,
) -> list[list[int]]:
    """The indices of this rank's samples, in order, in each of `count` epochs.

    The first of them has the number `first`. Every epoch has an order of its
    own, that of a `DistributedSampler` with this seed.
    """
    # write this
    sampler = DistributedSampler(range(samples), size, rank, seed=seed)
    visited = []
    for epoch in range(first, first + count):
        sampler.set_epoch(epoch)
        visited.append(list(sampler))
    return visited
    # until here
