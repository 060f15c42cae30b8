"""Synchronous SGD: N processes train one model, each on its own part of the data.

    gradient of a batch = (g_0 + g_1 + … + g_(N-1)) / N

The batch has N parts of the same size. g_r is the gradient of rank r's part: images that the rank
draws from its own share of the data. The ranks start with equal parameters. In each step every rank
computes the gradient of its part, then all ranks average their gradients and take the same step. So
their models stay equal.

    python -m playground sgd
    torchrun --nproc-per-node 2 lesson.py

    Rank 0, epoch 1: loss 1.3196, test accuracy 90.90%
    Rank 1, epoch 1: loss 1.3180, test accuracy 90.90%
    …
    Rank 0, epoch 10: loss 0.2199, test accuracy 97.88%
    Rank 1, epoch 10: loss 0.2210, test accuracy 97.88%
    Rank 0, by hand: largest difference from one process 3e-17
    Rank 1, by hand: largest difference from one process 3e-17
    Rank 0, by DDP: largest difference from one process 3e-17
    Rank 1, by DDP: largest difference from one process 3e-17

The losses differ, because each rank has its own images. The accuracies are the same, because the
models are equal. The last lines compare the parameters with those of one process that has the whole
batch. DDP is DistributedDataParallel, which averages the gradients for you.
Source: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
"""

from copy import deepcopy
from random import Random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from playground.lessons.mnist import Net, accuracy, load_mnist

EPOCHS = 10
BATCH_SIZE = 128  # images of all ranks together
LR = 0.01
MOMENTUM = 0.5


def plain_step(model, optimizer, images, labels):
    """A step of one process. Return the loss."""
    optimizer.zero_grad()
    loss = F.nll_loss(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def average_gradients(model):
    """Replace each gradient by its mean over all ranks. All ranks must call this."""
    size = dist.get_world_size()
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= size


def train_step(model, optimizer, images, labels):
    """A step of all ranks together. Return the loss of this rank's images."""
    optimizer.zero_grad()
    loss = F.nll_loss(model(images), labels)
    loss.backward()
    average_gradients(model)
    optimizer.step()
    return loss.detach()


class Partition:
    """The samples of a dataset at the given indices."""

    def __init__(self, data, indices):
        self.data = data
        self.indices = torch.tensor(indices)

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, i):
        """One sample or, for a slice or a tensor of positions, a batch."""
        return self.data[self.indices[i]]


class DataPartitioner:
    """Cut a dataset into fractions, in a random order. Every rank makes the same cut."""

    def __init__(self, data, fractions):
        self.data = data
        self.partitions = []
        indices = list(range(len(data)))
        Random(1234).shuffle(indices)
        for fraction in fractions:
            length = int(fraction * len(data))
            self.partitions.append(indices[:length])
            indices = indices[length:]

    def use(self, rank):
        return Partition(self.data, self.partitions[rank])


def partition_dataset(rank, size):
    """This rank's part of MNIST, and how many of its images make a batch."""
    partition = DataPartitioner(load_mnist(), [1 / size] * size).use(rank)
    return partition, BATCH_SIZE // size


def five_steps(model, step, batch):
    """The parameters of the model after five steps with the same batch."""
    images, labels = batch
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for _ in range(5):
        step(model, optimizer, images.double(), labels)
    return parameters_to_vector(model.parameters()).detach()


def compare_with_one_process(rank, size, data):
    """Print how far this rank's parameters are from those of one process with the whole batch.

    Each rank also does the work of the one process. All train in float64 and without dropout, so
    only rounding may differ.
    """
    batch = Partition(data, range(BATCH_SIZE))
    part = DataPartitioner(batch, [1 / size] * size).use(rank)
    torch.manual_seed(1234)
    model = Net().double().eval()  # eval() turns dropout off
    expected = five_steps(deepcopy(model), plain_step, batch[:])
    by_hand = five_steps(deepcopy(model), train_step, part[:])
    by_ddp = five_steps(DistributedDataParallel(deepcopy(model)), plain_step, part[:])
    wrong = []
    for name, params in (("by hand", by_hand), ("by DDP", by_ddp)):
        difference = (params - expected).abs().max().item()
        print(f"Rank {rank}, {name}: largest difference from one process {difference:.0e}")
        if not difference < 1e-9:
            wrong.append(name)
    assert not wrong, f"not the training of one process: {', '.join(wrong)}"


def run(rank, size):
    assert BATCH_SIZE % size == 0, f"{size} ranks cannot divide a batch of {BATCH_SIZE} equally"
    torch.manual_seed(1234)  # the same initial parameters on every rank
    model = Net().to(memory_format=torch.channels_last)  # CPUs convolve faster in this layout
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    torch.manual_seed(1234 + rank)  # from here on, each rank draws its own order and masks
    train_set, batch_size = partition_dataset(rank, size)
    test_set = load_mnist(train=False)
    for epoch in range(1, EPOCHS + 1):
        batches = torch.randperm(len(train_set)).split(batch_size)
        epoch_loss = 0.0
        for positions in batches:
            images, labels = train_set[positions]
            epoch_loss += train_step(model, optimizer, images, labels)
        loss, test_accuracy = epoch_loss / len(batches), accuracy(model, test_set)
        print(f"Rank {rank}, epoch {epoch}: loss {loss:.4f}, test accuracy {test_accuracy:.2%}")
    compare_with_one_process(rank, size, train_set.data)  # of all ranks' parts


if __name__ == "__main__":
    dist.init_process_group("gloo")  # the rank is in an environment variable, set by torchrun
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
