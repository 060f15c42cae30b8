"""All rules. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from playground.explain.right.averaging import find_averaging
from playground.explain.right.calls import find_misuses, find_other_layouts, find_shifted
from playground.explain.right.clipping import find_clipped
from playground.explain.right.data import RULES as DATA
from playground.explain.right.drift import find_drifts
from playground.explain.right.facts import RankFacts
from playground.explain.right.files import find_early_load, find_overwritten, find_shared_file
from playground.explain.right.finding import Finding
from playground.explain.right.models import RULES as MODELS
from playground.explain.right.optimizers import RULES as OPTIMIZERS
from playground.explain.right.samples import find_shared_samples
from playground.explain.right.sharding import RULES as SHARDING

RULES: Sequence[Callable[[Sequence[RankFacts]], Iterator[Finding]]] = (
    find_drifts,
    find_averaging,
    find_clipped,
    *DATA,
    *OPTIMIZERS,
    *MODELS,
    *SHARDING,
    find_shared_samples,
    find_shared_file,
    find_early_load,
    find_overwritten,
    find_misuses,
    find_other_layouts,
    find_shifted,
)
