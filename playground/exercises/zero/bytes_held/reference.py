def bytes_held(ranks: int, parameters: int) -> dict[str, int]:
    """Predict the bytes that a rank holds after backward and a step of Adam.

    "ddp", "zero_1", "zero_2", "zero_3": parameters, gradients and optimizer's
    state together, in float32.
    """
    # write this
    whole, shard = 4 * parameters, 4 * parameters // ranks
    return {
        "ddp": 4 * whole,
        "zero_1": 2 * whole + 2 * shard,
        "zero_2": whole + 3 * shard,
        "zero_3": 4 * shard,
    }
    # until here
