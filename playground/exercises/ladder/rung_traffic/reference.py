def rung_traffic(
    ranks: int,
    sizes: list[int],
    cap: int,
) -> dict[str, list[int]]:
    """Predict what three rungs call and send.

    "calls": of all_reduce, of per_parameter, flat and bucketed, in this order.
    "bytes": those that a rank sends in them, in the same order.
    """
    # write this
    buckets, filled = 0, 0
    for elements in reversed(sizes):
        filled += 4 * elements
        if filled >= cap:
            buckets, filled = buckets + 1, 0
    buckets += filled > 0
    sent = 2 * (ranks - 1) * 4 * sum(sizes) // ranks
    return {"calls": [len(sizes), 1, buckets], "bytes": [sent] * 3}
    # until here
