def fit_the_stages() -> dict[str, int]:
    """Choose the number of ranks along each axis: "dp", "pp", "tp"."""
    # write this
    return {"dp": 2, "pp": 8, "tp": 4}
    # until here
