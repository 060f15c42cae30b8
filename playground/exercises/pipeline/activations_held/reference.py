def activations_held(stages: int, microbatches: int) -> dict[str, list[int]]:
    """Predict, for each stage, what it holds and sends in a step.

    "gpipe", "one_forward_one_backward": the most microbatches that are held
    between forward and backward. "messages": activations and gradients sent.
    """
    # write this
    held = [min(microbatches, stages - stage) for stage in range(stages)]
    ends = [(stage > 0) + (stage < stages - 1) for stage in range(stages)]
    return {
        "gpipe": [microbatches] * stages,
        "one_forward_one_backward": held,
        "messages": [microbatches * neighbours for neighbours in ends],
    }
    # until here
