def compressed_traffic(ranks: int, rows: int, columns: int) -> dict[str, float]:
    """Predict the bytes that a rank sends for the gradient of one matrix.

    "float32", "int8", "sign", "top_2_percent", "rank_1": in one step.
    """
    # write this
    numbers = rows * columns
    all_reduce, all_gather = 2 * (ranks - 1) / ranks, ranks - 1
    return {
        "float32": all_reduce * 4 * numbers,
        "int8": all_gather * (numbers + 4 * numbers / 64),
        "sign": all_gather * (numbers / 8 + 4),
        "top_2_percent": all_gather * (4 + 4) * numbers / 50,
        "rank_1": all_reduce * 4 * (rows + columns),
    }
    # until here
