def fit_the_mesh() -> dict[str, int]:
    """Choose the number of ranks along each axis ("dp", "pp", "tp") and "zero"."""
    # write this
    return {"dp": 128, "pp": 1, "tp": 2, "zero": 3}
    # until here
