"""The generators of random numbers of a rank's process: those of Python, numpy's legacy functions
and torch. Imports neither numpy nor torch.

A process that Python starts seeds them from the system's entropy. A fork inherits their states
instead, and a kept process still has those of the function before. So each fork, and each function
in a kept process, gets new seeds. Then ranks draw different numbers unless the program seeds them.

Source: `createCPUGenerator` in aten/src/ATen/CPUGeneratorImpl.cpp (torch 2.15);
https://numpy.org/doc/stable/reference/random/legacy.html
"""

from __future__ import annotations

import random
import sys
from typing import Any

_seeded: list[Any] = []
"""What `read_seeds` returned after the latest `seed_generators`."""


def seed_generators() -> None:
    """Seed every generator from the system's entropy, as a new process does."""
    random.seed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
        if torch.cuda.is_initialized():  # before, each device's generator has yet to be made
            torch.cuda.seed_all()
    _seeded[:] = read_seeds()


def is_seeded_by_program() -> bool:
    """Whether the program has seeded a generator since `seed_generators`, or has drawn from
    Python's or numpy's: of these only the state is known."""
    seeds = zip(read_seeds(), _seeded, strict=True)
    return any(before is not None and now != before for now, before in seeds)


def read_seeds() -> list[Any]:
    """The state of Python's generator, that of numpy's, and the seed of torch's; None for a package
    that is not imported."""
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    state = numpy.get_state(legacy=False) if numpy else {}
    return [
        random.getstate(),
        (state["state"]["key"].tobytes(), state["state"]["pos"]) if state else None,
        torch.initial_seed() if torch else None,
    ]
