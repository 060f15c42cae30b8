def choose_batch() -> dict[str, int]:
    """Choose "gpus", and "sequences" of a batch."""
    # write this
    return {"gpus": 128, "sequences": 512}
    # until here
