"""What autograd keeps for backward, in bytes."""

from __future__ import annotations

import torch
from torch import nn

from playground.training.activations import ActivationCounter


def test_memory_counts_once_and_until_its_last_holder_has_gone() -> None:
    """exp and sin keep the same 4000 bytes; a parameter counts as nothing."""
    layer = nn.Linear(1000, 1, bias=False)
    start = torch.zeros(1000, requires_grad=True)
    counter = ActivationCounter(layer)
    with counter:
        first = start.exp()
        assert counter.nbytes == 4000
        second = first.sin()
        third = (first * 2).cos()
        assert counter.nbytes == 8000
        del second
        assert counter.nbytes == 8000
        fourth = layer(first)
        assert counter.nbytes == 8000
        del third
        assert counter.nbytes == 4000
        del first, fourth
    assert (counter.nbytes, counter.peak) == (0, 8000)
