"""Beyond DistributedDataParallel: of the gradient of an embedding only the rows in use travel.

A batch holds few of the words of a vocabulary, and all rows of the others have a gradient of zero. Dense, the gradient
of 30,000 words of width 384 is a message of 46 MB, and since embeddings are the first layer it is ready last, when no
backward is left to hide it behind. The rows of a batch of 500 words are less than 1 MB.
Horovod gathers the rows and indexes of every rank. Here the ranks first agree on which rows any of them has used: then
those are a dense message of one shape on all ranks, which any all-reduce adds up, and a row that many ranks have used
travels as one. It is never longer than the whole gradient, however many rows are in use.
Source: https://horovod.readthedocs.io/en/stable/api.html (allreduce of tf.IndexedSlices)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from playground.runtime.errors import UsageError
from playground.training.gradients import AllReduce, buckets
from playground.training.overlap import OverlappedAverage
from playground.training.settings import BUCKET_CAP


class SparseEmbeddings(OverlappedAverage):
    """Averages the gradients of embeddings by the rows that are in use on some rank, and all others as
    `OverlappedAverage` does.

    It sets `sparse` of the model's `nn.Embedding`s, so that backward computes (index, row) for each word of the batch
    in place of a matrix. `after_backward` leaves in every `param.grad` the mean over all ranks as an ordinary, dense
    gradient, for an ordinary optimizer: the parameters are those of DistributedDataParallel, up to the order of
    additions. Whoever calls `zero_grad(set_to_none=False)` gets the same means, but sends every row.

    What uses the whole weight needs the whole gradient. A weight that another module has too (a tied output layer)
    travels in the buckets. One that forward uses without its module (`embedding.weight[:length]`) has a dense gradient,
    which counts as one that uses every row; then as much is sent as without this class, and a byte per row.

    Raises `UsageError` for embeddings with `max_norm`, or with `sparse` set before.
    """

    def __init__(self, model: nn.Module, all_reduce: AllReduce = dist.all_reduce, bucket_cap: int = BUCKET_CAP) -> None:
        weights = use_sparse_gradients(model)
        super().__init__(model, all_reduce, bucket_cap, excluded=set(weights))
        self.rows = [EmbeddingRows(of_one_type) for of_one_type in buckets(weights)]

    def after_backward(self) -> None:
        """Wait until every `param.grad` is the mean."""
        self.start_remaining()  # before the rows on every rank, for the order of messages must be the same
        for rows in self.rows:
            rows.average(self.all_reduce)
        super().after_backward()

    def give_up(self) -> None:
        while self.remaining:
            self.start_next()
        for rows in self.rows:
            rows.give_up(self.all_reduce)
        super().give_up()


class EmbeddingRows:
    """The gradients of embeddings of one type, averaged together in two messages."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.grads = [RowGradient(weight) for weight in weights]

    def average(self, all_reduce: AllReduce) -> None:
        """Leave in `grad` of every weight its mean over all ranks."""
        used = torch.cat([grad.used_rows() for grad in self.grads])
        all_reduce(used, op=dist.ReduceOp.MAX)  # 1 where some rank uses the row
        masks = used.split([len(grad.weight) for grad in self.grads])
        parts = [grad.load(mask.nonzero().squeeze(1)) for grad, mask in zip(self.grads, masks, strict=True)]
        flat = torch.cat([part.flatten() for part in parts])
        if len(flat):
            all_reduce(flat, op=dist.ReduceOp.SUM)
        for grad, part in zip(self.grads, flat.split([part.numel() for part in parts]), strict=True):
            grad.store(part)

    def give_up(self, all_reduce: AllReduce) -> None:
        """Send the two messages without a gradient, as a rank whose backward raised; `grad` stays as it is."""
        grads = [(grad.weight, grad.weight.grad) for grad in self.grads]
        for weight, _ in grads:
            weight.grad = None
        self.average(all_reduce)
        for weight, kept in grads:
            weight.grad = kept


class RowGradient:
    """The gradient of an embedding's weight: sparse as backward computes it, dense as the optimizer reads it.

    The dense one is kept, and only the rows of the step before are cleared: zeroing, or even allocating, 46 MB in every
    step would take longer than sending the rows.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.dense = weight, torch.zeros_like(weight, requires_grad=False)
        self.rows = torch.empty(0, dtype=torch.int64, device=weight.device)
        """Those of `dense` that are not zero."""
        self.version = self.dense._version

    def used_rows(self) -> torch.Tensor:
        """uint8 [rows]: 1 where this rank has a gradient."""
        used, grad = torch.zeros(len(self.weight), dtype=torch.uint8, device=self.weight.device), self.weight.grad
        if grad is not None and grad.is_sparse:
            used[grad._indices()[0]] = 1  # as they come, a word as often as it was used
        elif grad is not None:
            used.fill_(1)
        return used

    def load(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` of this rank's gradient, as its part of the mean: [rows, width]. All others must be zero."""
        grad, part_of_mean = self.weight.grad, 1 / dist.get_world_size()
        if grad is self.dense:  # backward has added to what was there
            grad *= part_of_mean
        else:
            self.clear()
            if grad is not None:
                self.dense.add_(grad, alpha=part_of_mean)
        self.rows = rows
        return self.dense[rows]

    def clear(self) -> None:
        """Make all of `dense` zero."""
        if self.dense._version == self.version:
            self.dense[self.rows] = 0
        else:  # somebody else has written into it since, who knows where
            self.dense.zero_()

    def store(self, averaged: torch.Tensor) -> None:
        """Make `averaged`, the elements of `self.rows`, the weight's gradient, and zero what is not among them."""
        self.dense[self.rows] = averaged.view(-1, *self.dense.shape[1:])
        self.weight.grad, self.version = self.dense, self.dense._version


def use_sparse_gradients(model: nn.Module) -> list[nn.Parameter]:
    """Let backward compute sparse gradients where a weight is used by an embedding alone. Returns these weights.

    Raises `UsageError` for embeddings whose rows cannot be averaged so.
    """
    others = {
        param
        for module in model.modules()
        if not isinstance(module, nn.Embedding) or module.scale_grad_by_freq  # for which torch has no sparse gradient
        for param in module.parameters(recurse=False)
    }
    weights: dict[nn.Parameter, None] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight.requires_grad and module.weight not in others:
            check_embedding(name, module)
            module.sparse = True
            weights[module.weight] = None
    return list(weights)


def check_embedding(name: str, embedding: nn.Embedding) -> None:
    """Raise `UsageError` if the rows of its gradient cannot be averaged."""
    if embedding.max_norm is not None:
        raise UsageError(
            f"sparse-embeddings on {name}, which has max_norm: each rank would rescale only the rows it uses, and the "
            f"replicas would drift apart: leave max_norm out"
        )
    if embedding.sparse:
        raise UsageError(
            f"sparse-embeddings on {name}, which has sparse=True: the averaged gradients are dense, and its optimizer "
            f"expects sparse ones: leave sparse out"
        )
