"""The bytes of a training step in closed form: what a parameter takes, and what backward needs of a
block, and what ZeRO's stages hold and send. Does not import torch.

The programs of gpt and memory count them, zero and mesh shard them.
Sources: Korthikanti et al., 2022, arXiv 2205.05198; Rajbhandari et al., 2020, arXiv 1910.02054
"""

from __future__ import annotations

FLOAT32, MIXED = (4, 4, 8), (2, 2, 12)
"""Bytes of a parameter, its gradient, and its optimizer's state. Adam keeps two numbers of float32;
in mixed precision, the float32 master besides."""
STAGES = range(len(MIXED) + 1)
"""Those of ZeRO, DDP's is 0: each shards one more of the three, the last first."""
COLLECTIVES_OF_STAGE = {
    "ddp": ("all_reduce",),
    "zero-1": ("reduce_scatter", "all_gather"),
    "zero-2": ("reduce_scatter", "all_gather"),
    "zero-3": ("all_gather", "all_gather", "reduce_scatter"),
}
"""By ZeRO's stages, the collectives of a step, of the bytes of all parameters each."""
KEPT_WIDTHS = 16
"""Numbers that a block keeps of a token, in widths of the model: its input, the normed input, 3 of
queries, keys and values, the output of attention; the input of its second half, the same normed, 4
before GELU and 4 behind it. Attention stores no square."""
MASKS = 2
"""Dropout's masks in a block, of a width of bytes each."""


def state_bytes(kinds: tuple[int, ...], stage: int = 0, ranks: int = 1) -> float:
    """Bytes that a parameter takes on each of `ranks` by a stage of ZeRO; `FLOAT32` or `MIXED`."""
    whole = len(kinds) - stage
    return sum(kinds[:whole]) + sum(kinds[whole:]) / ranks


def kept_bytes(
    tokens: float,
    width: int,
    blocks: float,
    itemsize: int,
    masks: int = 0,
    *,
    recompute: bool = False,
) -> float:
    """Bytes that blocks keep for backward of these tokens; if they `recompute` their activations,
    of their inputs alone. Numbers have `itemsize` bytes."""
    widths = itemsize if recompute else KEPT_WIDTHS * itemsize + masks
    return widths * tokens * width * blocks
