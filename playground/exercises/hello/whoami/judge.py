"""Who am I: what the process group knows, and what only the environment says."""

from __future__ import annotations

import os

from playground.exercises.cases import Case, Cases


def cases(rank: int, size: int, seed: int) -> Cases:
    kept = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    try:
        for ranks in (1, 2):
            os.environ.update(LOCAL_RANK=str(rank % ranks), LOCAL_WORLD_SIZE=str(ranks))
            returns = {"rank": rank, "size": size, "node": rank // ranks}
            yield Case(f"nodes of {ranks}", (), returns=returns, is_coded=False, gives_rank=False)
    finally:
        os.environ.update(kept)
