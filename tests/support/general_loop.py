"""The general training loop, with every way to average that settings can ask for."""

from __future__ import annotations

from torch import nn

from playground.algorithms import load_all_reduce
from playground.algorithms.link import Link
from playground.training.loop import prepare_and_train
from playground.training.replicas import broadcast_parameters
from playground.training.results import TrainingResult
from playground.training.settings import TrainingSettings
from playground.training.sync import GradSync, new_grad_sync


def sync_by_hand(model: nn.Module, settings: TrainingSettings) -> GradSync:
    """The way to average that the settings ask for, of replicas that start equal."""
    broadcast_parameters(model)
    all_reduce = load_all_reduce(settings.all_reduce)
    if settings.link:
        all_reduce = Link(settings.link).all_reduce(all_reduce)
    values = {"bucket_cap": settings.bucket_cap, "sync_every": settings.sync_every}
    return new_grad_sync(settings.sync, model, all_reduce=all_reduce, **values)


def train_by_hand(rank: int, size: int, settings: TrainingSettings) -> TrainingResult:
    return prepare_and_train(settings, sync_by_hand)
