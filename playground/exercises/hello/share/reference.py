def share(rank: int, size: int, samples: int) -> tuple[int, int]:
    """Begin and end (exclusive) of this rank's samples.

    Shares are consecutive; the first ones may be longer by one.
    """
    # write this
    each, rest = divmod(samples, size)
    start = rank * each + min(rank, rest)
    return start, start + each + (rank < rest)
    # until here
