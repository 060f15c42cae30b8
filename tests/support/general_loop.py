"""The general training loop, with every way to average that settings can ask for."""

from __future__ import annotations

from torch import nn

from playground.training.loop import prepare_and_train
from playground.training.replicas import broadcast_parameters
from playground.training.results import TrainingResult
from playground.training.settings import TrainingSettings
from playground.training.sync import GradSync, build_grad_sync


def sync_by_hand(model: nn.Module, settings: TrainingSettings) -> GradSync:
    broadcast_parameters(model)
    return build_grad_sync(model, settings)


def train_by_hand(rank: int, size: int, settings: TrainingSettings) -> TrainingResult:
    return prepare_and_train(settings, sync_by_hand)
