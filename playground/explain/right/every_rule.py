"""All rules, in the order of the files that have them. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from playground.explain.right.averaging import find_averaging
from playground.explain.right.calls import find_misuses, find_other_layouts, find_shifted
from playground.explain.right.clipping import find_clipped
from playground.explain.right.data import (
    find_equal_batches,
    find_left_out,
    find_one_order,
    find_other_draws,
    find_padding,
    find_repeated_shares,
)
from playground.explain.right.drift import find_drifts
from playground.explain.right.facts import RankFacts
from playground.explain.right.files import find_early_load, find_overwritten, find_shared_file
from playground.explain.right.finding import Finding
from playground.explain.right.models import (
    find_equal_masks,
    find_means,
    find_reduced_loss,
    find_statistics,
)
from playground.explain.right.optimizers import find_twice, find_unowned, find_untrained
from playground.explain.right.samples import find_shared_samples
from playground.explain.right.sharding import find_plain, find_replicas_apart, find_saved_part

Rule = Callable[[Sequence[RankFacts]], Iterator[Finding]]
"""From the facts of all ranks to what is wrong."""
RULES: Sequence[Rule] = (
    find_drifts,
    find_averaging,
    find_clipped,
    find_equal_batches,
    find_other_draws,
    find_one_order,
    find_padding,
    find_repeated_shares,
    find_left_out,
    find_means,
    find_equal_masks,
    find_statistics,
    find_reduced_loss,
    find_untrained,
    find_twice,
    find_unowned,
    find_replicas_apart,
    find_plain,
    find_saved_part,
    find_shared_samples,
    find_shared_file,
    find_early_load,
    find_overwritten,
    find_misuses,
    find_other_layouts,
    find_shifted,
)
