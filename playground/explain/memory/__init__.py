"""Does it fit? What was alive on a simulated GPU when it held most, by the lines of the program.
Does not import torch.

PyTorch's caching allocator tells of each allocation. Each rank notes the line of the program that
has caused it, and what it is for:

| kind        | memory of                                                                         |
|-------------|-----------------------------------------------------------------------------------|
| parameters  | parameters of optimizers and of modules                                           |
| gradients   | their `grad`, and DistributedDataParallel's buckets of them                       |
| optimizer   | the optimizer's state, and what its step needs for a moment                       |
| activations | what else forward and backward allocate                                           |
| other       | all the rest: inputs, buffers, what is not known                                  |

    recorder  in a rank: notes the causes of allocations
    peaks     what was alive when a GPU held most
    report    peaks in words
    run       a run whose memory is recorded
"""

from __future__ import annotations

KINDS = ("other", "parameters", "gradients", "optimizer", "activations")
"""By the number that they have in the simulated GPU's record."""
OTHER, PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS = range(len(KINDS))
OF_BACKWARD = len(KINDS)
"""What autograd has allocated: gradients if it is left at the end of a step, else activations."""
MOST_KINDS = 8
"""A cause is the number of a line times this, plus a kind."""


def file_name(rank: int) -> str:
    """The name of what a rank has recorded."""
    return f"rank-{rank}.memory"
