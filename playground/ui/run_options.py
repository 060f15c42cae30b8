"""The options of every run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from playground.base.flags import ANY, flag
from playground.world.backends import BACKENDS
from playground.world.rendezvous.rendezvous import DEFAULT_TIMEOUT, MAX_RANKS


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How many ranks a command runs on, how they meet, and how it shows its results."""

    size: int | None = flag(
        None, "Number of ranks.", least=1, most=MAX_RANKS, name="-n --world-size"
    )
    backend: str = flag(
        "gloo",
        f"{'; '.join(f'{backend.name}: {backend.summary}' for backend in BACKENDS.values())}.",
        choices=BACKENDS,
    )
    gpus: int | None = flag(
        None,
        "Simulate so many GPUs, on a machine that has none: nccl and CUDA work, computed by the "
        "CPU. Whatever is measured says nothing of a GPU's speed.",
        least=1,
        most=64,
    )
    gpu_memory: int | None = flag(
        None,
        "Memory of each simulated GPU, as 80G. What does not fit raises OutOfMemoryError.",
        is_size=True,
        shown_default="4G",
        needs={"gpus": ANY},
    )
    timeout: float = flag(
        DEFAULT_TIMEOUT,
        "Seconds after which a run is ended in which no rank gives a sign of life.",
        above=0,
        below=1e6,
    )
    seed: int = flag(1234, "Seed of the random number generators.", least=0, most=2**32)
    wide: bool = flag(
        False,
        "Show all steps and all columns of every table, even if lines get wider than the terminal.",
    )
    as_json: bool = flag(False, "Print one JSON document instead of text.", name="--json")
    see: Path | None = flag(
        None,
        "Record what the ranks do, and render it: .html plays it, .svg is a picture, .txt says it "
        "in words, .json is a trace for Perfetto, .playground keeps the recording for `see`.",
        metavar="FILE",
    )


COMMON = ("size", "backend", "timeout", "wide", "as_json", "see")
"""The options of nearly every run: fields of `RunOptions`."""
