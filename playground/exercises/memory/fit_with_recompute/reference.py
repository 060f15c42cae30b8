def fit_with_recompute() -> dict[str, int]:
    """Choose "zero", the stage, "microbatch" and "recompute" (0 or 1)."""
    # write this
    return {"zero": 3, "microbatch": 4, "recompute": 1}
    # until here
