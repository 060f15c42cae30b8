def does_it_fit(layers: int, width: int, memory: int) -> dict[str, int]:
    """Predict what a training step needs, and what fits in `memory` bytes.

    "state": bytes of parameters, gradients and Adam's two moments.
    "samples": the largest power of two of samples whose step fits.
    """
    # write this
    state = 4 * 4 * layers * width * width
    samples = 1
    while state + 4 * width * (layers + 1) * 2 * samples <= memory:
        samples *= 2
    return {"state": state, "samples": samples}
    # until here
