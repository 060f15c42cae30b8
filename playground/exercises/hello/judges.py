"""Judges of the exercises on hello."""

from __future__ import annotations

import os

from playground.exercises.cases import Case, Cases


def whoami(rank: int, size: int, seed: int) -> Cases:
    """Who am I: what the process group knows, and what only the environment says."""
    kept = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    try:
        for ranks in (1, 2):
            os.environ.update(LOCAL_RANK=str(rank % ranks), LOCAL_WORLD_SIZE=str(ranks))
            returns = {"rank": rank, "size": size, "node": rank // ranks}
            yield Case(f"nodes of {ranks}", (), returns=returns, is_coded=False, gives_rank=False)
    finally:
        os.environ.update(kept)


def share(rank: int, size: int, seed: int) -> Cases:
    """Who works on what: as even as can be, all samples, each once."""
    for samples in (7, 12, 60_000, 2, 1, 0):
        ends = [0]
        for other in range(size):
            ends.append(ends[-1] + (samples - ends[-1] + size - other - 1) // (size - other))
        about, due = f"{samples:,} sample{'s' * (samples != 1)}", (ends[rank], ends[rank + 1])
        yield Case(about, (samples,), returns=due, is_coded=False)
