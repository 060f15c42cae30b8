def fit_in_memory() -> dict[str, int]:
    """Choose ZeRO's stage ("zero") and a microbatch's sequences ("microbatch")."""
    # write this
    return {"zero": 3, "microbatch": 2}
    # until here
