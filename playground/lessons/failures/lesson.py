"""Five programs train a wrong model, in four ranks wait in vain, and one is only slow.

`right` trains a small network on all ranks with DistributedDataParallel. The five functions after
it make one mistake each. They raise no error, and their loss falls. Two numbers show the mistake:
the largest difference from rank 0, and from one process. Run one of the others by --program NAME.

    python -m playground failures
    torchrun --nproc-per-node 4 lesson.py

    right            loss 1.90  between ranks 0e+00  from one process 2e-16
    bypass_ddp       loss 2.14  between ranks 1e+00  from one process 7e-01
    repeat_batches   loss 1.99  between ranks 0e+00  from one process 4e+00
    skip_a_step      loss 2.46  between ranks 4e-01  from one process 3e-01
    average_one_half loss 1.87  between ranks 5e-01  from one process 3e-01
    swap_gradients   loss 5.99  between ranks 9e-01  from one process 1e+00
"""

import time
from difflib import get_close_matches

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# compare, or one of right, bypass_ddp, repeat_batches, skip_a_step, average_one_half,
# swap_gradients, stop_early, wait_in_a_circle, send_first, evaluate_on_one_rank, save_for_long
PROGRAM = "compare"
BATCH_SIZE = 24  # of all ranks together


def make_data():
    """240 inputs and their targets, [240, 8] both. One target is damaged."""
    torch.manual_seed(1)
    inputs = torch.randn(240, 8)
    targets = inputs @ torch.randn(8, 8)
    targets[100] *= 10
    return TensorDataset(inputs, targets)


def make_batches(rank, size):
    """Every size-th sample, from sample `rank` on. All ranks' k-th batches make one whole batch."""
    data = make_data()
    assert BATCH_SIZE % (2 * size) == 0, f"{BATCH_SIZE} samples: no two halves for {size} ranks"
    sampler = DistributedSampler(data, size, rank, shuffle=False)
    return DataLoader(data, BATCH_SIZE // size, sampler=sampler)


def make_model():
    """A small network, with the same parameters on all ranks."""
    torch.manual_seed(1234)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))


def train(model, batches):
    """Train a model, make a step for each batch, and return the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for inputs, targets in batches:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def one_process():
    """Each rank trains alone on all 24 samples of a batch. The others are compared with this."""
    model = make_model()
    for inputs, targets in make_batches(0, 1):
        params = list(model.parameters())
        gradients = torch.autograd.grad(mse_loss(model(inputs), targets), params)
        for param, gradient in zip(params, gradients, strict=True):
            param.data -= 0.5 * gradient
    return model


def right(rank, size):
    """Each rank trains on its part of a batch. In backward, DDP averages the gradients."""
    return train(DistributedDataParallel(make_model()), make_batches(rank, size))


def bypass_ddp(rank, size):
    """The forward pass calls the model inside of DDP. DDP then averages nothing in backward."""
    model = DistributedDataParallel(make_model())
    return train(model.module, make_batches(rank, size))


def repeat_batches(rank, size):
    """Without a sampler, each rank takes every sample: all ranks take the same steps."""
    return train(DistributedDataParallel(make_model()), DataLoader(make_data(), BATCH_SIZE // size))


def skip_a_step(rank, size):
    """The rank that has the damaged sample leaves out a step. The other ranks make it."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for inputs, targets in make_batches(rank, size):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        if targets.abs().max() < 20:  # only the damaged target is larger
            optimizer.step()
    return model


def average_one_half(rank, size):
    """A step takes its batch in two halves. DDP averages after the first, but should after both."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for inputs, targets in make_batches(rank, size):
        optimizer.zero_grad()
        for half in (0, 1):
            model.require_backward_grad_sync = half == 0  # what `with model.no_sync():` sets
            loss = mse_loss(model(inputs.chunk(2)[half]), targets.chunk(2)[half])
            (loss / 2).backward()
        optimizer.step()
    return model


def swap_gradients(rank, size):
    """Rank 0 starts with the last weight: gradients of different weights are added."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for inputs, targets in make_batches(rank, size):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        params = list(model.parameters())
        for param in params[::-1] if rank == 0 else params:
            dist.all_reduce(param.grad)
            param.grad /= size
        optimizer.step()
    return model


def stop_early(rank, size):
    """Each rank trains until its own error is small. Rank 0 is the first to leave the loop."""
    weight, sample = torch.zeros(1), 1 + rank / size
    while (sample - weight).abs() > 0.5:
        error = sample - weight
        dist.all_reduce(error)
        weight += 0.1 * error / size


def wait_in_a_circle(rank, size):
    """Average in groups of two. All ranks begin with the right neighbour, so no two meet."""
    pairs = [dist.new_group([left, (left + 1) % size]) for left in range(size)]
    number = torch.tensor([rank + 1.0])
    for pair in (pairs[rank], pairs[rank - 1]):  # pairs[-1] is the last
        dist.all_reduce(number, group=pair)
        number /= 2


def send_first(rank, size):
    """On gloo, `send` returns when the other rank receives. Here all ranks send first."""
    number, received = torch.tensor([rank + 1.0]), torch.zeros(1)
    dist.send(number, dst=(rank + 1) % size)
    dist.recv(received, src=(rank - 1) % size)


def evaluate_on_one_rank(rank, size):
    """Only rank 0 calls all_reduce. The other ranks are in the barrier already."""
    if rank == 0:
        loss = torch.tensor([1.0])
        dist.all_reduce(loss)
    dist.barrier()


def save_for_long(rank, size):
    """Rank 0 saves for 20 seconds, and the others wait for it. The program ends."""
    if rank == 0:
        time.sleep(20)
    dist.barrier()


TRAIN = (right, bypass_ddp, repeat_batches, skip_a_step, average_one_half, swap_gradients)
WAIT = (stop_early, wait_in_a_circle, send_first, evaluate_on_one_rank, save_for_long)


def compare(rank, size, programs):
    """Run trainings. Rank 0 prints the loss of the first 100 samples, and both differences."""
    inputs, targets = (each[:100] for each in make_data().tensors)  # without the damaged one
    expected = parameters_to_vector(one_process().parameters()).detach()
    for program in programs:
        model = program(rank, size)
        params = parameters_to_vector(model.parameters()).detach()
        of_rank_0 = params.clone()
        dist.broadcast(of_rank_0, src=0)
        between, from_one = (params - of_rank_0).abs().max(), (params - expected).abs().max()
        dist.all_reduce(between, op=dist.ReduceOp.MAX)
        dist.all_reduce(from_one, op=dist.ReduceOp.MAX)
        loss = mse_loss(model(inputs), targets)
        if rank == 0:
            row = f"{program.__name__:17}loss {loss:.2f}  between ranks {between:.0e}"
            print(f"{row}  from one process {from_one:.0e}")
        if program is right:
            assert max(between, from_one) < 1e-9, "right: not the training of one process"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding hides no difference
    dist.init_process_group("gloo")
    programs = {program.__name__: program for program in (*TRAIN, *WAIT)}
    nearest = get_close_matches(PROGRAM, ("compare", *programs), 1, cutoff=0)[0]
    assert nearest == PROGRAM, f"there is no program {PROGRAM}: did you mean {nearest}?"
    trainings = [program for program in TRAIN if PROGRAM in ("compare", program.__name__)]
    if trainings:
        compare(dist.get_rank(), dist.get_world_size(), trainings)
    else:
        programs[PROGRAM](dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
