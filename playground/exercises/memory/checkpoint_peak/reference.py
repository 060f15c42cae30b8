def checkpoint_peak(
    samples: int,
    width: int,
    blocks: int,
    every: int,
) -> dict[str, int]:
    """Predict the bytes that autograd keeps for backward of a stack of blocks.

    "all": after forward, without checkpoints. "checkpointed": after forward,
    with a checkpoint around each `every` blocks. "peak": the most at any moment
    of a forward and a backward with checkpoints.
    """
    # write this
    tensor = 4 * samples * width
    groups = blocks // every
    return {
        "all": (blocks + 1) * tensor,
        "checkpointed": groups * tensor,
        "peak": (groups + every) * tensor,
    }
    # until here
