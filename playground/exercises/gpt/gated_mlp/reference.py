def gated_mlp(tokens: int, channels: int, inner: int) -> dict[str, int]:
    """Predict what a gated MLP has, keeps and computes.

    "parameters". "kept": the numbers that forward keeps for backward.
    "operations": of the products of matrices, in forward and backward.
    """
    # write this
    parameters = 3 * channels * inner
    return {
        "parameters": parameters,
        "kept": tokens * (channels + 4 * inner),
        "operations": 6 * parameters * tokens,
    }
    # until here
