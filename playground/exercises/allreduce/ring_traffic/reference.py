def ring_traffic(ranks: int, elements: int) -> dict[str, int]:
    """Predict what all-reduces of a float32 tensor send.

    "messages": those of one rank in the ring. "all_bytes": those of all ranks
    together in the ring. "root_bytes": those of rank 0 in reduce-broadcast.
    """
    # write this
    return {
        "messages": 2 * (ranks - 1),
        "all_bytes": 2 * (ranks - 1) * elements * 4,
        "root_bytes": (ranks - 1) * elements * 4,
    }
    # until here
