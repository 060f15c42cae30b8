"""A model in DistributedDataParallel that takes numbered steps: the same ones, whoever takes them.

Batch `number` is the same samples in every run, and so are the dropout masks drawn for it on a rank. What differs
between two runs then comes from what they were made with.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.ddp.results import Difference
from playground.lessons.ddp.settings import LabSettings
from playground.runtime import device, report
from playground.runtime.backends import backend_of
from playground.training.data import Batch, Images
from playground.training.models import IMAGE_MODELS
from playground.training.partition import share
from playground.training.replicas import flat
from playground.training.settings import TrainingSettings
from playground.training.step import backward, mean_loss_part, training_step
from playground.training.sync import GradSync


class DDPRun:
    """`options` are those of DistributedDataParallel."""

    def __init__(self, model: nn.Module, training: TrainingSettings, bucket_cap_mb: float, **options: bool) -> None:
        backend_of().use_deterministic_kernels()
        self.training = training
        self.images = Images(training.folder, "train", training.limit)
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **options)
        self.sync = GradSync(self.ddp)
        self.params = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=training.lr, momentum=training.momentum)

    def batch(self, number: int) -> Batch:
        """This rank's share of a batch: images [share, 1, 28, 28] in the model's type, labels [share].

        After the last sample comes the first again.
        """
        batch_size, size = self.training.batch_size, dist.get_world_size()
        shares = [share(batch_size, rank, size) for rank in range(dist.get_rank() + 1)]
        first = number * batch_size + sum(shares[:-1])
        images, labels = self.images.span(first, shares[-1])
        return images.to(device(), self.params[0].dtype), labels.to(device())

    def loss(self, model: nn.Module, batch: Batch, batches: int = 1) -> torch.Tensor:
        """This rank's part of the mean loss over `batches` batches, of which `batch` is one, or all."""
        images, labels = batch
        samples_per_rank = batches * self.training.batch_size / dist.get_world_size()
        return mean_loss_part(model(images), labels, samples_per_rank)

    def numbered_loss(self, model: nn.Module, number: int) -> torch.Tensor:
        """This rank's part of the mean loss over that batch, with the dropout masks drawn for it."""
        torch.manual_seed(self.training.seed + 1 + dist.get_rank() + dist.get_world_size() * number)
        return self.loss(model, self.batch(number))

    def backward(self, number: int) -> float:
        """Leave in every `param.grad` its mean over all ranks for one batch. This rank's part of the loss."""
        report(batch=number)
        return float(backward(self.optimizer, [partial(self.numbered_loss, self.ddp, number)], self.sync))

    def step(self, number: int) -> float:
        """The same, and the optimizer's step. The gradients stay."""
        report(batch=number)
        return float(training_step(self.optimizer, [partial(self.numbered_loss, self.ddp, number)], self.sync))

    def exact_mean(self, number: int) -> torch.Tensor:
        """The mean over all ranks of their own gradients, flat, added up in float64."""
        grads = torch.autograd.grad(self.numbered_loss(self.ddp.module, number), self.params)
        mean = flat(grads).double()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    def gradients(self) -> torch.Tensor:
        """All of them, flat, as float64."""
        return flat(param.grad for param in self.params).double()

    def parameters(self) -> torch.Tensor:
        """All of them, flat, as float64."""
        return flat(self.params).double()


def build_model(name: str, seed: int) -> nn.Module:
    """A model with the same parameters at every call, on this rank's device."""
    torch.manual_seed(seed)
    model: nn.Module = IMAGE_MODELS[name].code().to(device())
    return model


def build_run(settings: LabSettings, bucket_cap_mb: float | None = None, **options: bool) -> DDPRun:
    """A run from its start, with the lab's last bucket cap unless another is given."""
    model = build_model(settings.model, settings.training.seed)
    return DDPRun(model, settings.training, bucket_cap_mb or settings.bucket_caps[-1], **options)


def measure_difference(values: torch.Tensor, reference: torch.Tensor) -> Difference:
    """How far `values` are from `reference`, both flat."""
    difference = values - reference
    return Difference(max=difference.abs().max().item(), relative=(difference.norm() / reference.norm()).item())
