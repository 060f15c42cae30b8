"""Training by the general loop, whose ranks are killed after given steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from general_loop import sync_by_hand

from playground.lessons.elastic.experiment import die_if_due
from playground.lessons.elastic.page import Kill
from playground.training.loop import prepare_and_train, sync_with_ddp
from playground.training.results import TrainingResult
from playground.training.settings import TrainingSettings


def by_hand(
    rank: int, size: int, settings: TrainingSettings, kills: Sequence[Kill]
) -> TrainingResult:
    """Average as the settings ask. Each time the world is started, the next of `kills` happens."""
    return prepare_and_train(settings, sync_by_hand, partial(die_if_due, rank, kills))


def with_ddp(
    rank: int, size: int, settings: TrainingSettings, kills: Sequence[Kill]
) -> TrainingResult:
    """Train as ddp does. Each time the world is started, the next of `kills` happens."""
    return prepare_and_train(settings, sync_with_ddp, partial(die_if_due, rank, kills))
