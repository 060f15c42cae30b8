"""Judges of the exercises on bert."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from playground.exercises.cases import Case, Cases, gradients, held_gradients

LENGTH, PADDING = 7, -100


def token_loss(rank: int, size: int, seed: int) -> Cases:
    """The mean over tokens, of which ranks have unequally many. One process in float64 is the
    oracle."""
    for about, shortest in (("sentences of different lengths", 1), ("a rank without tokens", 0)):
        torch.manual_seed(seed)
        whole = nn.Linear(3, 4).double()
        model, inputs = copy.deepcopy(whole), torch.randn(size, 2, LENGTH, 3).double()
        labels = torch.randint(4, (size, 2, LENGTH))
        for other in range(size):  # 0 or 1 token a sentence on rank 0, then 3, 5, 7
            labels[other, :, min(LENGTH, shortest + 2 * other) :] = PADDING
        if size == 1:
            labels[0, 0] = 0
        F.cross_entropy(whole(inputs).flatten(0, 2), labels.flatten()).backward()
        given, due = (model, inputs[rank], labels[rank]), {"grad": gradients(whole)}
        most = 36 * (size - 1)  # the gradients and some numbers, not the sentences
        held = partial(held_gradients, model)
        yield Case(about, given, held=held, expected=due, is_coded=False, most_moved=most)
