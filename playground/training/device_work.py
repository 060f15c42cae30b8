"""Hooks that mark device copies and compute where they happen.

They do nothing unless the run is recorded: the recorder then replaces them by functions of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


@contextlib.contextmanager
def moving(
    part: str, tensors: Sequence[tuple[torch.device, torch.Tensor]], target: torch.device
) -> Iterator[None]:
    """In this block, `part` of a training step copies these tensors to `target`, each from the
    device beside it."""
    yield


@contextlib.contextmanager
def working_for(device: torch.device) -> Iterator[None]:
    """In this block, what this thread computes is `device`'s work."""
    yield
