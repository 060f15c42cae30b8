"""What ZeRO's stages hold and send of float32 parameters, in closed form."""

from __future__ import annotations

from playground.algorithms.bytes_sent import times_sent
from playground.training.formulas import COLLECTIVES_OF_STAGE, FLOAT32, state_bytes


def times_held(method: str, size: int) -> float:
    """What a rank holds of parameters, gradients and Adam's state, in bytes of the parameters."""
    return state_bytes(FLOAT32, list(COLLECTIVES_OF_STAGE).index(method), size) / FLOAT32[0]


def stage_bytes_sent(method: str, model_bytes: float, size: int) -> float:
    """The bytes that a rank sends in a step."""
    return times_sent(size, *COLLECTIVES_OF_STAGE[method]) * model_bytes
