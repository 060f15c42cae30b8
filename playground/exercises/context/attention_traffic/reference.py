def attention_traffic(
    ranks: int,
    heads: int,
    length: int,
    head_width: int,
) -> dict[str, int]:
    """Predict the bytes that a rank sends in one attention, in float32.

    "ring_forward", "ring_backward", "ulysses_forward", "ulysses_backward".
    """
    # write this
    own = 4 * heads * head_width * length // ranks
    return {
        "ring_forward": 2 * own * (ranks - 1),
        "ring_backward": 2 * own * (ranks - 1) + 2 * own * ranks,
        "ulysses_forward": 4 * own * (ranks - 1) // ranks,
        "ulysses_backward": 4 * own * (ranks - 1) // ranks,
    }
    # until here
