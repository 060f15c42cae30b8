"""Missing waits that the simulated GPU has found in this process. Does not import torch."""

from __future__ import annotations

import ctypes
import os

from playground.base.host import SIMULATED_GPUS


def notice_of_wait(end: str) -> str:
    """A regular expression for what `races.cpp` writes to stderr of a missing wait, wherever its
    lines break; it has all but the rank as its group. `end`: that of the last sentence."""
    return rf"simulated GPU: (?:rank \d+: )?(a wait is missing: .*?To\s+fix\s+it,.*?{end})"


def count_races() -> int:
    """The number of missing waits so far; 0 in a process without simulated GPUs."""
    return int(load().simulated_gpu_races()) if os.environ.get(SIMULATED_GPUS) else 0


def races_since(number: int) -> list[str]:
    """The missing waits from that number on, each in a few words: `aten::add after ncclAllReduce`.
    Of a process with more than 10,000, the first ones."""
    race = load().simulated_gpu_race
    race.argtypes, race.restype = [ctypes.c_size_t], ctypes.c_char_p
    found = (race(each) for each in range(number, count_races()))
    return [words.decode() for words in found if words]


def load() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.simulated_gpu_races.restype = ctypes.c_size_t
    return library
