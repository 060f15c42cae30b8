def mlp_traffic(
    ranks: int,
    layers: int,
    tokens: int,
    width: int,
) -> dict[str, int]:
    """Predict what a rank of a sharded stack of MLPs has, calls and sends.

    "parameters": those of a rank. "all_reduces" and "bytes": its calls, and
    what it sends in them, in a step. "sequence_bytes": what it sends with
    sequence parallelism.
    """
    # write this
    layer = (8 * width**2 + 4 * width) // ranks + width
    calls = 2 * layers
    sent = calls * 2 * (ranks - 1) * 4 * tokens * width // ranks
    return {
        "parameters": layers * layer,
        "all_reduces": calls,
        "bytes": sent,
        "sequence_bytes": sent,
    }
    # until here
