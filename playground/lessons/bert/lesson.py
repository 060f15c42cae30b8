"""Three ways to train an encoder such as BERT on N devices. They differ in what comes together.

    gather_logits        one process, logits come together on a device
    gather_losses        one process, losses come together on a device
    average_gradients    N processes, gradients come together on all devices

    python -m playground bert
    torchrun --nproc-per-node 2 lesson.py

                       first   last loss, kB held by each device, difference
    one_device        1.3232 0.4225  7,089      0e+00
    gather_logits     1.3232 0.4225  3,900  3,357      7e-12
    gather_losses     1.3232 0.4225  3,900  3,357      7e-12
    average_gradients 1.3232 0.4225  4,347  4,347      7e-12

Each way trains on the same batches. multinli.py trains the real BERT.
Sources: Devlin et al., BERT, 2019, arXiv 1810.04805; Vaswani et al., Attention Is All You Need,
2017, arXiv 1706.03762; https://github.com/tunib-ai/large-scale-lm-tutorials
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from playground.lessons.data_parallel.lesson import data_parallel
from playground.lessons.devices import copy_to, find_devices, place, track_memory, use

STEPS = 20  # of each training
BATCH = 48  # texts of a step, on all devices together; the number of ranks must divide it
LR = 4e-3
LENGTH, WORDS, CLASSES = 16, 60, 3  # tokens of a text; words and classes that there are
WIDTH, HEADS, LAYERS = 32, 4, 2  # of the encoder


class Encoder(nn.Module):
    """Tokens [B, LENGTH] to logits [B, CLASSES]. As in BERT, the first token has the answer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS)
        self.classify = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        return self.classify(self.layers(self.words(tokens) + self.positions)[:, 0])


class LossModel(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, labels):
        return cross_entropy(self.model(tokens), labels)


def one_device(model, tokens, labels, devices):
    """The whole batch on one device."""
    logits = model(copy_to(tokens, devices[0], "scatter"))
    return cross_entropy(logits, copy_to(labels, devices[0], "targets"))


def gather_logits(model, tokens, labels, devices):
    """Gather the logits, and compute the loss on the first device."""
    logits = data_parallel(model, [tokens], devices, devices[0])
    return cross_entropy(logits, copy_to(labels, devices[0], "targets"))


def gather_losses(model, tokens, labels, devices):
    """Compute a loss on each device, and gather the losses. Their mean is the batch's loss."""
    return data_parallel(LossModel(model), [tokens, labels], devices, devices[0]).mean()


def average_gradients(model, tokens, labels, devices):
    """Compute the loss of this rank's part. DDP averages the gradients in backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return one_device(model, tokens.chunk(size)[rank], labels.chunk(size)[rank], devices)


def make_batch():
    """Random tokens [BATCH, LENGTH], and as labels [BATCH] the classes of their first tokens."""
    tokens = torch.randint(WORDS, (BATCH, LENGTH))
    return tokens, tokens[:, 0] % CLASSES


def train(compute_loss, wrap, devices):
    """Train on one device or on several. Return parameters, losses, and what each device held."""
    torch.manual_seed(1234)
    losses = []
    with track_memory(devices) as memory, use(devices[0]):
        model = place(Encoder(), devices[0])
        optimizer = torch.optim.Adam(model.parameters(), LR, fused=True)
        wrapped = wrap(model)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = compute_loss(wrapped, *make_batch(), devices)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    held = [memory.peak(device) for device in devices]
    return parameters_to_vector(model.parameters()).detach(), torch.stack(losses), held


def keep(model):
    return model


def print_row(name, losses, held, difference):
    counts = " ".join(f"{count / 1000:6,.0f}" for count in held)
    print(f"{name:17} {losses[0]:.4f} {losses[-1]:.4f} {counts} {difference:10.0e}")


def run(rank, size):
    assert BATCH % size == 0, f"{size} ranks cannot divide a batch of {BATCH} equally"
    devices = find_devices(size)
    # what the others must equal: the training of one device
    expected, alone, held = train(one_device, keep, [devices[rank]])
    wrong = []
    if rank == 0:  # this process drives all devices, while the other ranks wait
        print("                   first   last loss, kB held by each device, difference")
        print_row("one_device", alone, held, 0)
        for way in gather_logits, gather_losses:
            params, losses, held = train(way, keep, devices)
            difference = (params - expected).abs().max()
            print_row(way.__name__, losses, held, difference)
            if not difference < 1e-9:
                wrong.append(way.__name__)
    params, losses, held = train(average_gradients, DistributedDataParallel, [devices[rank]])
    divided = size == 1 or losses[0] != alone[0]
    dist.all_reduce(losses)
    difference = (params - expected).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    held_by_rank = [None] * size
    dist.all_gather_object(held_by_rank, held[0])
    if rank == 0:
        print_row("average_gradients", losses / size, held_by_rank, difference)
    if not difference < 1e-9:
        wrong.append("average_gradients")
    assert not wrong, f"not the training of one device: {', '.join(wrong)}"
    assert divided, "average_gradients: each rank computes the loss of the whole batch"
    torch.manual_seed(1234)  # as in train
    start = parameters_to_vector(place(Encoder(), devices[rank]).parameters())
    assert not torch.equal(expected, start), "nothing is trained: no parameter has changed"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide an error
    torch.set_default_device("cpu")  # batches come from the host's memory
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
