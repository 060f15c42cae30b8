"""What ZeRO's stages hold and send of float32 parameters, in closed form."""

from __future__ import annotations

from playground.algorithms.cost_model import times_sent
from playground.training.formulas import COLLECTIVES_OF_STAGE, FLOAT32, state_bytes

WIDTH_OF = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""


def times_held(way: str, size: int) -> float:
    """What a rank holds of float32 parameters, gradients and Adam's state, in bytes of the
    parameters."""
    return state_bytes(FLOAT32, list(COLLECTIVES_OF_STAGE).index(way), size) / FLOAT32[0]


def stage_bytes_sent(
    way: str, model_bytes: float, size: int, dtype: str = "float32", reduce_dtype: str = "float32"
) -> float:
    """The bytes that a rank sends in a step. Parameters are gathered in `dtype`, gradients reduced
    in `reduce_dtype`; `model_bytes` are those of float32."""
    widths = {"all_gather": WIDTH_OF[dtype], "reduce_scatter": WIDTH_OF[reduce_dtype]}
    return sum(
        widths.get(call, 4) / 4 * times_sent(size, call) * model_bytes
        for call in COLLECTIVES_OF_STAGE[way]
    )
