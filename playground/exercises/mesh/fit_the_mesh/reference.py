def fit_the_mesh() -> dict[str, int]:
    """Choose "dp", "pp" and "tp", ranks along each axis, and "zero"."""
    # write this
    return {"dp": 128, "pp": 1, "tp": 2, "zero": 3}
    # until here
