"""A model in DistributedDataParallel that takes numbered steps, the same ones in every run; what it sends, recorded.

Batch `number` is the same samples in every run, and so are the dropout masks drawn for it on a rank. What differs
between two runs then comes from what they were made with.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.ddp.settings import LabSettings, Row
from playground.runtime import device, report
from playground.runtime.backends import backend_of
from playground.runtime.tap import Call, Observer
from playground.training.data import Batch, Images
from playground.training.net import Net
from playground.training.partition import share
from playground.training.replicas import flat
from playground.training.settings import TrainingSettings
from playground.training.step import backward, mean_loss_part, training_step
from playground.training.sync import GradSync


class DDPRun:
    """A DistributedDataParallel with its optimizer and data."""

    def __init__(self, model: nn.Module, training: TrainingSettings, bucket_cap_mb: float) -> None:
        backend_of().use_deterministic_kernels()
        self.training = training
        self.images = Images(training.folder, "train", training.limit)
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        self.sync = GradSync(self.ddp)
        self.params = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=training.lr, momentum=training.momentum)

    def batch(self, number: int) -> Batch:
        """This rank's share of a batch: images [share, 1, 28, 28] in the model's type, labels [share]. After the last
        sample comes the first again."""
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


def build_model(seed: int) -> nn.Module:
    """A `Net` with the same parameters at every call, on this rank's device."""
    torch.manual_seed(seed)
    model: nn.Module = Net().to(device())
    return model


def build_run(settings: LabSettings, bucket_cap_mb: float | None = None) -> DDPRun:
    """A run from its start, with the lab's last bucket cap unless another is given."""
    model = build_model(settings.training.seed)
    return DDPRun(model, settings.training, bucket_cap_mb or settings.bucket_caps[-1])


def measure_errors(values: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """The largest difference of an element of two flat vectors, and the norm of all, relative to the reference's."""
    difference = values - reference
    return difference.abs().max().item(), (difference.norm() / reference.norm()).item()


class MessageRecorder(Observer):
    """Records what hooks send, as all of torch's do, by all-reduce: also in threads of gloo's."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        """The dtype and the bytes of each message."""

    def begun(self, call: Call) -> None:
        if call.method == "allreduce":
            self.sent += [(str(each.dtype).removeprefix("torch."), each.nbytes) for each in call.inputs]


class BucketRecorder:
    """Records which gradients get ready in backward, and which buckets a DistributedDataParallel sends."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.names = {param: name for name, param in model.module.named_parameters()}
        self.ready: list[str] = []
        """Names of parameters, as their gradients got ready."""
        self.sent: list[Row] = []
        """The buckets, as they left: rows of the part buckets."""
        for param in self.names:
            param.register_post_accumulate_grad_hook(lambda param: self.ready.append(self.names[param]))
        model.register_comm_hook(None, lambda state, bucket: self.record(bucket))

    def record(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A communication hook that also sends the bucket, as DDP would."""
        names = [self.names[param] for param in bucket.parameters()]
        about = {"bucket": bucket.index(), "bytes": bucket.buffer().nbytes, "ready": len(self.ready)}
        self.sent.append({**about, "parameters": names})
        return allreduce_hook(None, bucket)

    def clear(self) -> None:
        """Forget what was recorded."""
        self.ready, self.sent = [], []
