"""Who works on what: as even as can be, all samples, each once."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases


def cases(rank: int, size: int, seed: int) -> Cases:
    for samples in (7, 12, 60_000, 2, 1, 0):
        ends = [0]
        for other in range(size):
            ends.append(ends[-1] + (samples - ends[-1] + size - other - 1) // (size - other))
        about, due = f"{samples:,} sample{'s' * (samples != 1)}", (ends[rank], ends[rank + 1])
        yield Case(about, (samples,), returns=due, is_coded=False)
