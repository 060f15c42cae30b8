def token_traffic(
    counts: list[list[int]],
    width: int,
) -> dict[str, list[int]]:
    """Predict, for each rank, the rows it computes and the bytes it sends.

    "rows": those that arrive at its experts, its own included. "dispatch",
    "combine", "backward": bytes to other ranks, in float32.
    """
    # write this
    ranks = range(len(counts))
    each = len(counts[0]) // len(counts)
    rows = []
    for own in counts:
        rows.append([sum(own[b * each : (b + 1) * each]) for b in ranks])
    out = [4 * width * (sum(rows[r]) - rows[r][r]) for r in ranks]
    arrived = [sum(row[r] for row in rows) for r in ranks]
    back = [4 * width * (arrived[r] - rows[r][r]) for r in ranks]
    return {
        "rows": arrived,
        "dispatch": out,
        "combine": back,
        "backward": [out[r] + back[r] for r in ranks],
    }
    # until here
