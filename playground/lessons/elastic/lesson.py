"""A training that is killed, and resumed from a snapshot, ends with the bits of one that is not.

A snapshot has all that the next step depends on: the parameters, the optimizer's momentum, each
rank's random state, and the number of steps done. It does not say which images come next: their
order follows from the seed and the epoch. A snapshot is written to another file, forced to the
disk, then renamed.

    python -m playground elastic
    torchrun --standalone --nproc-per-node 4 --max-restarts 2 lesson.py

    Start 0 begins after step 0
    Rank 3 is killed after step 7
    Start 1 begins after step 4
    Rank 3 is killed after step 11
    Start 2 begins after step 8
    largest difference from a training that was not killed 0e+00

When a rank is gone, torchrun ends the other ranks and starts all ranks again, --max-restarts times
at most. As long as there are restarts left, the program kills its last rank. --standalone gives
each run an id of its own, which is in the name of the snapshot. Set PLAYGROUND_DATA_DIR to the
folder of MNIST, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: each start then has a new store.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, Subset

from playground.lessons.mnist import Net, load_mnist

EPOCHS = 2
IMAGES = 480  # of the training set
BATCH_SIZE = 48  # images of all ranks together
LR = 0.01
MOMENTUM = 0.5
SAVE_EVERY = 4  # steps
KILL_AFTER = 7  # steps of a start


def new_training(rank, size):
    """What every start makes again, from the same seeds: model, optimizer and batches."""
    data = Subset(load_mnist(), range(IMAGES))
    sampler = DistributedSampler(data, size, rank, seed=1234)
    batches = DataLoader(data, BATCH_SIZE // size, sampler=sampler)
    torch.manual_seed(1234)  # the same parameters on all ranks
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    torch.manual_seed(1234 + rank)  # from here on, different dropout masks on each rank
    return model, optimizer, batches


def train_step(model, optimizer, images, labels):
    """A step of all ranks together, as in sgd."""
    optimizer.zero_grad()
    F.nll_loss(model(images), labels).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    optimizer.step()


def train(rank, size):
    """The training that is not killed."""
    model, optimizer, batches = new_training(rank, size)
    for epoch in range(EPOCHS):
        batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            train_step(model, optimizer, images, labels)
    return model


def write(file, state):
    """Save the state. Whenever the process is killed or the power fails, the file holds all of
    this state, or all of what it held before."""
    part = file.with_suffix(".part")
    with part.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()  # from Python's buffer to the operating system
        os.fsync(stream.fileno())  # and to the disk, before the file gets its name
    os.replace(part, file)


def random_generator():
    """Torch's module with the random state from which dropout draws: of the GPU or of the CPU."""
    return torch.cuda if torch.get_default_device().type == "cuda" else torch


def save(file, model, optimizer, step):
    """Rank 0 writes a snapshot with the random states of all ranks. All ranks must call this."""
    random_states = [None] * dist.get_world_size()
    dist.all_gather_object(random_states, random_generator().get_rng_state())
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        write(file, {**state, "random_states": random_states})


def load(file, model, optimizer):
    """Restore model and optimizer. Return the step of the snapshot and this rank's random state."""
    if not file.exists():
        return 0, None
    state = torch.load(file, map_location="cpu")
    size = len(state["random_states"])
    assert size == dist.get_world_size(), f"the snapshot is of {size} ranks"
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["random_states"][dist.get_rank()]


def train_from_snapshot(rank, size, file):
    """The same training, from the snapshot on if there is one. Return the snapshot's step, too."""
    model, optimizer, batches = new_training(rank, size)
    done, random_state = load(file, model, optimizer)
    if rank == 0:
        print(f"Start {restart_count()} begins after step {done}", flush=True)
    step = 0
    for epoch in range(EPOCHS):
        batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            step += 1
            if step == done:  # not before the loop: its start draws what the snapshot has counted
                random_generator().set_rng_state(random_state)
            if step > done:
                train_step(model, optimizer, images, labels)
                if step % SAVE_EVERY == 0:
                    save(file, model, optimizer, step)
                if step == done + KILL_AFTER:
                    kill_last_rank(rank, size, step)
    return model, done


def restart_count():
    """How often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def kill_last_rank(rank, size, step):
    """Kill the last rank by SIGKILL, if torchrun has a restart left."""
    if rank == size - 1 and restart_count() < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        print(f"Rank {rank} is killed after step {step}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def run(rank, size):
    assert BATCH_SIZE % size == 0, f"{size} ranks cannot divide a batch of {BATCH_SIZE} equally"
    # all starts of a run have one id, and so one file
    file = Path(tempfile.gettempdir(), f"elastic-{os.environ.get('TORCHELASTIC_RUN_ID')}.pt")
    model, done = train_from_snapshot(rank, size, file)
    models = model, train(rank, size)
    vectors = [parameters_to_vector(each.parameters()).detach() for each in models]
    difference = (vectors[0] - vectors[1]).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if rank == 0:
        file.unlink(missing_ok=True)  # missing if there are fewer than SAVE_EVERY steps
        print(f"largest difference from a training that was not killed {difference:.0e}")
    # a GPU's kernels may add in another order when they run again
    allowed = 1e-6 if torch.get_default_device().type == "cuda" else 0
    assert difference <= allowed, "not the training that was not killed"
    resumed = done > 0 or restart_count() == 0 or KILL_AFTER < SAVE_EVERY
    assert resumed, "this start does not begin after a snapshot of the start before"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
