"""The lesson's run: each way against one process, then training, with its bytes, messages and
activations counted."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from playground.algorithms.link import Link
from playground.lessons.tensor.lesson import (
    GPTConfig,
    Group,
    new_gpt,
    shard,
    shard_gpt,
    sum_replicated_gradients,
    vocab_parallel_cross_entropy,
)
from playground.lessons.tensor.page import TensorSettings, TensorTraining
from playground.runtime import device
from playground.runtime.rendezvous.agreement import require_same_on_all_ranks
from playground.runtime.tap import observing
from playground.training.gpt_run import Backward, backward_alone, batches, compare, train
from playground.training.one_process import EXACT_STEPS


def run(rank: int, size: int, settings: TensorSettings) -> list[TensorTraining]:
    """This rank's training by each way."""
    require_same_on_all_ranks(vars(settings))
    return [run_way(way, settings) for way in settings.ways]


def shard_like(full: Tensor, local: Tensor, group: Group = None) -> Tensor:
    """This rank's shard of a parameter, of the shape of `local`."""
    sharded = [dim for dim in range(local.dim()) if local.shape[dim] < full.shape[dim]]
    return shard(full, sharded[0], group) if sharded else full


def run_way(way: str, settings: TensorSettings) -> TensorTraining:
    sequence = way == "sequence"

    def new_sharded(dtype: torch.dtype) -> tuple[nn.Module, Backward]:
        model = new_gpt(GPTConfig(), settings.seed).to(device(), dtype)
        replicated = shard_gpt(model, sequence=sequence)

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss = vocab_parallel_cross_entropy(model(tokens), targets)
            loss.backward()
            if sequence:
                sum_replicated_gradients(replicated)
            return loss.detach()

        return model, step

    alone = new_gpt(GPTConfig(), settings.seed).to(device(), torch.float64)
    exact = batches(settings.batch_size, EXACT_STEPS, settings.seed)
    differences = compare(
        way, new_sharded(torch.float64), (alone, backward_alone(alone)), exact, shard_like
    )
    model, step = new_sharded(torch.float32)
    whole = batches(settings.batch_size, settings.steps, settings.seed)
    with observing(Link(settings.link)) if settings.link else contextlib.nullcontext():
        found = train(way, model, step, whole)
    parameters = sum(param.nbytes for param in model.parameters())
    return TensorTraining(**vars(found), **vars(differences), parameters=parameters)
