"""Synchronous SGD: N processes train one model, each on its own part of the data.

    gradient of the whole batch = mean over the ranks of (gradient of a rank's part of the batch)

The ranks start with equal parameters. In each step every rank computes the gradient of its own
samples, then all ranks average their gradients and take the same step. So their models stay equal.

    python -m playground sgd
    torchrun --nproc-per-node 2 lesson.py

    Rank 0, epoch 1: loss 1.7070, test accuracy 87.31%
    Rank 1, epoch 1: loss 1.7106, test accuracy 87.31%
    …
    Rank 0, epoch 10: loss 0.1240, test accuracy 99.70%
    Rank 1, epoch 10: loss 0.1190, test accuracy 99.70%
    Rank 0: largest difference from one process 3e-17
    Rank 1: largest difference from one process 3e-17

The losses differ, because each rank has its own images. The accuracies are the same: it is one
model. (These are generated digits. On MNIST, the accuracy is about 90 % after one epoch.)
Source: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
"""

from copy import deepcopy
from random import Random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector

from playground.lessons.mnist import Net, accuracy, load_mnist

EPOCHS = 10
BATCH_SIZE = 128  # images of all ranks together
LR = 0.01
MOMENTUM = 0.5


def average_gradients(model):
    """Replace each gradient by its mean over all ranks. All ranks must call this."""
    size = dist.get_world_size()
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= size


class Partition:
    """The samples of a dataset at the given indices."""

    def __init__(self, data, indices):
        self.data = data
        self.indices = torch.tensor(indices)

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, i):
        """One sample or, for a tensor of positions, a batch."""
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

    def use(self, partition):
        return Partition(self.data, self.partitions[partition])


def train_step(model, optimizer, images, labels):
    """Take one step, which is the same on all ranks. Return the loss of this rank's samples."""
    optimizer.zero_grad()
    loss = F.nll_loss(model(images), labels)
    loss.backward()
    average_gradients(model)
    optimizer.step()
    return loss.detach()


def difference_from_one_process(rank, size, data):
    """The largest difference of a parameter of this rank from one process with the whole batch.

    Both take five steps with the same batch, in float64 and without dropout. Rounding remains.
    """
    batch = Partition(data, range(BATCH_SIZE))
    images, labels = DataPartitioner(batch, [1 / size] * size).use(rank)[:]
    all_images, all_labels = batch[:]
    torch.manual_seed(1234)
    model = Net().double().eval()  # eval() turns dropout off
    expected = deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    one_process = torch.optim.SGD(expected.parameters(), lr=LR, momentum=MOMENTUM)
    for _ in range(5):
        train_step(model, optimizer, images.double(), labels)
        one_process.zero_grad()
        F.nll_loss(expected(all_images.double()), all_labels).backward()
        one_process.step()
    params, expected_params = (parameters_to_vector(m.parameters()) for m in (model, expected))
    return (params - expected_params).abs().max().item()


def run(rank, size):
    assert BATCH_SIZE % size == 0, f"{size} ranks cannot divide a batch of {BATCH_SIZE} equally"
    torch.manual_seed(1234)  # the same initial parameters on every rank
    model = Net().to(memory_format=torch.channels_last)  # CPUs convolve faster in this layout
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    torch.manual_seed(1234 + rank)  # from here on, different orders and dropout on each rank
    train_set, test_set = load_mnist(), load_mnist(train=False)
    partition = DataPartitioner(train_set, [1 / size] * size).use(rank)
    for epoch in range(1, EPOCHS + 1):
        batches = torch.randperm(len(partition)).split(BATCH_SIZE // size)
        epoch_loss = 0.0
        for batch in batches:
            images, labels = partition[batch]
            epoch_loss += train_step(model, optimizer, images, labels)
        mean_loss, right = epoch_loss / len(batches), accuracy(model, test_set)
        print(f"Rank {rank}, epoch {epoch}: loss {mean_loss:.4f}, test accuracy {right:.2%}")
    difference = difference_from_one_process(rank, size, train_set)
    print(f"Rank {rank}: largest difference from one process {difference:.0e}")


if __name__ == "__main__":
    dist.init_process_group()  # torchrun tells each process its rank, in environment variables
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
