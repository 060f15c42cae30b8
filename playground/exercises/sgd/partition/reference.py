from random import Random


def partition(
    rank: int,
    size: int,
    samples: int,
    sizes: list[float],
    seed: int,
) -> list[int]:
    """The indices of the samples in partition `rank`, in a random order.

    sizes: the fraction of the samples that each partition gets; they sum to 1.
    """
    # write this
    indices = list(range(samples))
    Random(seed).shuffle(indices)
    begin = round(sum(sizes[:rank]) * samples)
    end = round(sum(sizes[: rank + 1]) * samples)
    return indices[begin:end]
    # until here
