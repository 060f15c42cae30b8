def slow_link() -> dict[str, str | int]:
    """Choose a method of compression, and the steps between two averages:
    "method" and "every"."""
    # write this
    return {"method": "sign", "every": 32}
    # until here
