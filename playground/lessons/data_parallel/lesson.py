"""DataParallel: one process drives several devices, with a thread for each.

    chunks = scatter(inputs, devices)         a part of the batch for each
    replicas = replicate(module, devices)     a copy of the model for each
    outputs = parallel_apply(replicas, chunks, devices)
    output = gather(outputs, devices[0])      the outputs of all together

The devices are GPUs if there are enough, and else virtual ones: shares of the CPU's memory.

    python -m playground data-parallel
    python lesson.py

    30 inputs for cpu:0 are cut into 30
    30 inputs for cpu:0 cpu:1 are cut into 15 15
    30 inputs for cpu:0 cpu:1 cpu:2 are cut into 10 10 10
    2 inputs for cpu:0 cpu:1 cpu:2 are cut into 1 1
    kB copied to device         0       1       2       3 by gather_logits
    scatter                     1       1       1       0
    replicate                   0   2,608   2,608   2,608
    gather                  7,040       0       0       0
    targets                     2       0       0       0
    backward of gather          0   2,560   2,560   1,920
    backward of replicate   7,825       0       0       0
    kB held by device           0       1       2       3 difference
    one_device             31,533       0       0       0      0e+00
    gather_logits          31,442   5,218   5,218   4,565      3e-17
    gather_elsewhere        7,794   5,218   5,218  30,113      3e-17
    gather_losses          10,322   9,001   9,001   7,073      3e-17
    average_losses         10,322   9,001   9,001   7,073      3e-04
    keep_outputs           10,370   9,001   9,001   7,073      3e-17
    2000 small operations on each of cpu:0 take 266 ms
    2000 small operations on each of cpu:0 cpu:1 cpu:2 cpu:3 take 1135 ms

The first table shows a step of gather_logits. The second one shows what each device holds at most,
and the largest difference of a parameter from one device after two steps.

Sources: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html;
https://docs.pytorch.org/tutorials/beginner/blitz/data_parallel_tutorial.html;
https://hangzhang.org/PyTorch-Encoding/parallel.html (keep_outputs)
"""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from time import perf_counter

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from playground.lessons.devices import copy_to, find_devices, place, track_memory, use

DEVICES = 4  # GPUs, or virtual devices if there are fewer
BATCH = 30  # samples of a step
STEPS = 2  # of each training
LR = 0.1
OPERATIONS = 2000  # by which threads are timed
LENGTH, WIDTH, WORDS = 8, 32, 5_000  # of a sample, of a hidden layer, of the vocabulary


def scatter(inputs, devices):
    """A chunk of the batch for each device. A small batch has fewer chunks than devices."""
    pairs = zip(inputs.chunk(len(devices)), devices, strict=False)
    return [copy_to(chunk, device, "scatter") for chunk, device in pairs]


def replicate(module, devices):
    """A replica of the module for each device. Backward adds up their gradients in the module."""
    replicas = []
    for device in devices:
        tensors = [*module.parameters(), *module.buffers()]
        # deepcopy takes these copies for the tensors: autograd knows where their gradients go
        copies = {id(tensor): copy_to(tensor, device, "replicate") for tensor in tensors}
        replicas.append(deepcopy(module, copies))
    return replicas


def parallel_apply(replicas, chunks, devices):
    """The outputs of all replicas. Each replica has its own thread."""
    grad_enabled = torch.is_grad_enabled()  # a thread has its own: hand it on

    def apply(replica, args, device):
        with use(device), torch.set_grad_enabled(grad_enabled):
            return replica(*args)

    with ThreadPoolExecutor(len(replicas)) as pool:
        return [*pool.map(apply, replicas, chunks, devices)]


def gather(outputs, device):
    """All outputs on one device, one after another. Numbers become a vector."""
    return torch.cat([torch.atleast_1d(copy_to(output, device, "gather")) for output in outputs])


def apply_replicas(module, inputs, devices):
    """The outputs of replicas for chunks of the inputs. Each output stays on its device."""
    chunks = [*zip(*(scatter(each, devices) for each in inputs), strict=True)]
    used = devices[: len(chunks)]
    return parallel_apply(replicate(module, used), chunks, used)


def data_parallel(module, inputs, devices, output_device):
    """The output of a module that is on the first device, computed by all devices."""
    return gather(apply_replicas(module, inputs, devices), output_device)


def make_model(device):
    """A language model: tokens [B, LENGTH] to logits [B, LENGTH, WORDS]."""
    torch.manual_seed(1234)  # the same model and the same batches for each way to the loss
    layers = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WORDS)
    return place(nn.Sequential(*layers), device)


def mean_loss(logits, targets):
    """The mean over all words of logits [B, LENGTH, WORDS] and targets [B, LENGTH]."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def one_device(model, tokens, targets, devices):
    """The whole batch on the first device."""
    logits = model(copy_to(tokens, devices[0], "scatter"))
    return mean_loss(logits, copy_to(targets, devices[0], "targets"))


def gather_logits(model, tokens, targets, devices):
    """Gather the logits, and compute the loss on the first device."""
    logits = data_parallel(model, [tokens], devices, devices[0])
    return mean_loss(logits, copy_to(targets, devices[0], "targets"))


def gather_elsewhere(model, tokens, targets, devices):
    """Gather the logits, and compute the loss on the last device."""
    logits = data_parallel(model, [tokens], devices, devices[-1])
    return mean_loss(logits, copy_to(targets, devices[-1], "targets"))


class ParallelLossModel(nn.Module):
    """A model that returns its loss: a replica computes the loss of its chunk."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        return mean_loss(self.model(tokens), targets)


def reduce_losses(losses, targets, devices):
    """The mean over the batch, from the mean over each chunk. Chunks may differ in size."""
    sizes = [len(chunk) / len(targets) for chunk in targets.chunk(len(devices))]
    return losses @ losses.new_tensor(sizes)


def gather_losses(model, tokens, targets, devices):
    """Compute the loss in forward, and gather a number from each device."""
    losses = data_parallel(ParallelLossModel(model), [tokens, targets], devices, devices[0])
    return reduce_losses(losses, targets, devices)


def average_losses(model, tokens, targets, devices):
    """Wrong if chunks differ in size: a sample of a small chunk counts more than others."""
    inputs = [tokens, targets]
    return data_parallel(ParallelLossModel(model), inputs, devices, devices[0]).mean()


def keep_outputs(model, tokens, targets, devices):
    """Gather nothing but losses: the criterion, too, is applied in parallel."""
    outputs = apply_replicas(model, [tokens], devices)
    chunks = [*zip(outputs, scatter(targets, devices), strict=True)]
    losses = parallel_apply([mean_loss] * len(chunks), chunks, devices)
    return reduce_losses(gather(losses, devices[0]), targets, devices)


def library(model, tokens, targets, devices):
    """The library's gather_logits."""
    logits = nn.DataParallel(model, devices)(tokens)
    return mean_loss(logits, copy_to(targets, devices[0], "targets"))


def train(compute_loss, devices):
    """Return the parameters after STEPS steps, and what the devices held and copied meanwhile."""
    with track_memory(devices) as memory:
        model = make_model(devices[0])
        optimizer = torch.optim.SGD(model.parameters(), LR)
        for _ in range(STEPS):
            optimizer.zero_grad()
            text = torch.randint(WORDS, (BATCH, LENGTH + 1))
            compute_loss(model, text[:, :-1], text[:, 1:], devices).backward()
            optimizer.step()  # on the first device, which has all gradients
    return parameters_to_vector(model.parameters()).detach(), memory


def print_chunks(devices):
    for count, used in (30, devices[:1]), (30, devices[:2]), (30, devices[:3]), (2, devices[:3]):
        outputs = apply_replicas(nn.Identity(), [torch.zeros(count, 1)], used)
        print(f"{count} inputs for", *used, "are cut into", *(len(output) for output in outputs))


def print_row(name, numbers, *end):
    print(f"{name:21}", *(f"{number:7,.0f}" for number in numbers), *end)


def time_threads(devices):
    """Small operations on one device, then as many on each device at the same time."""
    replicas = replicate(nn.Sequential(*[nn.Linear(8, 8)] * OPERATIONS), devices)  # one layer
    chunks = [[copy_to(torch.zeros(1, 8), device, "scatter")] for device in devices]
    for used in devices[:1], devices:
        start = perf_counter()
        parallel_apply(replicas[: len(used)], chunks, used)
        milliseconds = 1000 * (perf_counter() - start)
        print(f"{OPERATIONS} small operations on each of", *used, f"take {milliseconds:.0f} ms")


def run():
    devices = find_devices(DEVICES)
    print_chunks(devices)
    print_row("kB copied to device", range(DEVICES), "by gather_logits")
    memory = train(gather_logits, devices)[1]
    for part in dict.fromkeys(part for part, source, target in memory.copied):  # each part once
        copied = [memory.copied_to(device, part) for device in devices]
        print_row(part, [count / 1000 / STEPS for count in copied])
    print_row("kB held by device", range(DEVICES), "difference")
    expected = train(one_device, devices)[0]
    wrong = []
    ways = one_device, gather_logits, gather_elsewhere, gather_losses, average_losses, keep_outputs
    for way in (*ways, library) if devices[0].type == "cuda" else ways:
        params, memory = train(way, devices)
        difference = (params - expected).abs().max()
        print_row(way.__name__, [memory.peak(d) / 1000 for d in devices], f"{difference:10.0e}")
        if way is not average_losses and not difference < 1e-9:
            wrong.append(way.__name__)
    time_threads(devices)
    assert not wrong, f"not the training of one device: {', '.join(wrong)}"
    start = parameters_to_vector(make_model(devices[0]).parameters())
    assert not torch.equal(expected, start), "nothing is trained: no parameter has changed"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide an error
    torch.set_default_device("cpu")  # batches come from the host's memory
    run()
