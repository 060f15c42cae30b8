"""The script to copy: DistributedDataParallel, and what a training needs around it.

DDP averages the gradients during backward. Around it stand: a sampler that gives each rank its own
images in every epoch, microbatches under no_sync, clipping, a checkpoint that rank 0 writes, and a
test accuracy that counts every image once.

    python -m playground ddp
    torchrun --nproc-per-node 2 lesson.py

    epoch 1: loss 1.4942, test accuracy 88.21%
    epoch 2: loss 0.7580, test accuracy 91.03%
    epoch 3: loss 0.6087, test accuracy 92.29%
    largest difference of any rank from one process 3e-17

Source: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
"""

import os
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from playground.lessons.mnist import Net, load_mnist

EPOCHS = 3
BATCH_SIZE = 128  # images of all ranks together
MICROBATCHES = 2  # parts of a rank's batch, of which each has its own forward and backward
LR = 0.01
MOMENTUM = 0.5
MAX_NORM = 1.0  # of all gradients together: longer ones are scaled down
CHECKPOINT = "checkpoint.pt"


def train_step(ddp, optimizer, images, labels):
    """A step of all ranks together. Return the loss of this rank's images."""
    optimizer.zero_grad()
    *first, last = zip(images.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True)
    with ddp.no_sync():  # forward is inside, because it decides whether backward averages
        loss = sum(add_gradients(ddp, part, len(images)) for part in first)
    loss += add_gradients(ddp, last, len(images))  # averages what has been added up
    clip_grad_norm_(ddp.parameters(), MAX_NORM)
    optimizer.step()
    return loss


def add_gradients(ddp, part, samples):
    """Backward of one microbatch. Return its share of the mean loss over `samples` images."""
    images, labels = part
    loss = F.nll_loss(ddp(images), labels, reduction="sum") / samples
    loss.backward()
    return loss.detach()


@torch.no_grad()
def accuracy(model, data, rank, size):
    """The fraction of all samples that is classified correctly. Every sample is on one rank."""
    images, labels = (tensor.tensor_split(size)[rank] for tensor in data.tensors)
    model.eval()
    correct = (model(images).argmax(1) == labels).sum()
    model.train()
    counts = torch.tensor([correct, len(images)])
    dist.all_reduce(counts)
    assert counts[1] == len(data), "accuracy: not every sample is counted once"
    return counts[0].item() / len(data)


def save(model, optimizer, epoch):
    """Write the checkpoint. If the process is killed, the file is this one or the one before."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, f"{CHECKPOINT}.part")
    os.replace(f"{CHECKPOINT}.part", CHECKPOINT)


def difference_from_one_process(rank, size, data):
    """The largest difference of a parameter after two steps, on any rank, from one process."""
    ddp = DistributedDataParallel(Net().double().eval())  # in float64, and without dropout
    model = deepcopy(ddp.module)  # DDP has given all ranks the parameters of rank 0
    ours, expected = (torch.optim.SGD(each.parameters(), lr=LR) for each in (ddp, model))
    labels = data.tensors[1][:BATCH_SIZE]
    for factor in (0.1, 10):  # of the images: only the second gradient is long enough to be clipped
        images = factor * data.tensors[0][:BATCH_SIZE].double()
        train_step(ddp, ours, images.chunk(size)[rank], labels.chunk(size)[rank])
        expected.zero_grad()
        F.nll_loss(model(images), labels).backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        expected.step()
    pairs = zip(ddp.parameters(), model.parameters(), strict=True)
    difference = max((param - other).detach().abs().max() for param, other in pairs)
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return difference.item()


def run(rank, size):
    assert BATCH_SIZE % size == 0, f"{size} ranks cannot divide a batch of {BATCH_SIZE} equally"
    torch.manual_seed(1234 + rank)  # different dropout on each rank
    train_set, test_set = load_mnist(), load_mnist(train=False)
    sampler = DistributedSampler(train_set, seed=1234)
    batches = DataLoader(train_set, BATCH_SIZE // size, sampler=sampler)
    model = Net().to(memory_format=torch.channels_last)  # CPUs convolve faster in this layout
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for epoch in range(1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        epoch_loss = torch.zeros(())
        for images, labels in batches:
            epoch_loss += train_step(ddp, optimizer, images, labels)
        dist.all_reduce(epoch_loss)
        loss = epoch_loss.item() / size / len(batches)
        test_accuracy = accuracy(model, test_set, rank, size)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, test accuracy {test_accuracy:.2%}")
            save(model, optimizer, epoch)
    difference = difference_from_one_process(rank, size, train_set)
    if rank == 0:
        print(f"largest difference of any rank from one process {difference:.0e}")
    assert difference < 1e-9, "not the training of one process"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
