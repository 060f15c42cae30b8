"""What else a run resumes from, and torch.distributed.checkpoint beside the board."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import DistributedSampler, Sampler

from playground.lessons.checkpoint.lesson import (
    cut,
    cut_for,
    load,
    newest,
    save,
    shared_folder,
)
from playground.lessons.sgd.lesson import average_gradients

SAMPLES, BATCH = 1000, 64


def new_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, after a step: before its first one, Adam has no state to load."""
    torch.manual_seed(1234)
    layers = {"up": nn.Linear(64, 96), "dropout": nn.Dropout(0.1), "down": nn.Linear(96, 64)}
    model = nn.Sequential(OrderedDict(layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and the optimizer's state, by name. What is loaded into these is restored."""
    state = {}
    for name, param in model.named_parameters():
        state[name] = param.detach()
        state |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    return state


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> float:
    """Take a step for each batch. Returns this rank's last loss."""
    for batch in batches:
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    return loss.item()


def random_states(rank: int, size: int) -> dict[str, object]:
    """Resume a training with dropout after 3 steps, with each rank's random state and without: this
    rank's loss in step 6. Parameters and the optimizer's state are restored in both."""
    model, optimizer = new_training()
    batches = torch.randn(6, 8, 64)
    random = torch.cuda if batches.is_cuda else torch
    torch.manual_seed(rank)  # different masks on each rank
    train(model, optimizer, batches[:3])
    losses = {}
    with shared_folder() as folder:
        shards = cut_for("ddp", state_of(model, optimizer), rank, size)
        save(folder / "3", shards, own=random.get_rng_state())
        losses["undisturbed"] = train(model, optimizer, batches[3:])
        for way in ("restored", "seeded_again"):
            model, optimizer = new_training()
            index = load(folder / "3", cut_for("ddp", state_of(model, optimizer), rank, size))
            torch.manual_seed(rank)
            if way == "restored":
                random.set_rng_state(index["own"][rank])
            losses[way] = train(model, optimizer, batches[3:])
    rounded = {way: round(loss, 4) for way, loss in losses.items()}
    return {**rounded, "equal_bits": losses["restored"] == losses["undisturbed"]}


@dataclass
class GlobalBatches(Sampler):
    """This rank's part of each global batch, a list of positions per step.

    The order follows from seed and epoch. So the epoch and the samples `seen` by all ranks together
    are the whole state, and any number of ranks can resume from it.
    """

    samples: int
    batch_size: int
    rank: int
    size: int
    epoch: int = 0
    seen: int = 0
    seed: int = 1234

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.samples, generator=generator, device="cpu").tolist()
        for start in range(self.seen, self.samples, self.batch_size):
            yield order[start : start + self.batch_size][self.rank :: self.size]

    def advance(self) -> None:
        """Call this after each step: a loader may have fetched batches that are not trained on."""
        self.seen += self.batch_size
        if self.seen >= self.samples:
            self.epoch += 1
            self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "seen": self.seen}


def samples(rank: int, size: int) -> dict[str, object]:
    """Kill a training after step 8, and let half as many ranks resume it from step 6: of an epoch's
    samples, how many count twice, and how many never.

    `skipping` saves no state: each rank skips as many samples as each had taken.
    """
    readers = max(1, size // 2)
    sampler, trained = GlobalBatches(SAMPLES, BATCH, rank, size), []
    with shared_folder() as folder:
        for step, positions in enumerate(sampler, 1):
            trained.append(positions)
            sampler.advance()
            if step % 3 == 0:
                save(folder / str(step), {}, common=sampler.state_dict())
            if step == 8:
                break
        state = load(newest(folder), {})["common"]
    done = state["seen"] // BATCH
    trained, skipped = trained[:done], done * BATCH // size  # later steps are lost with the model
    of_rank = [*DistributedSampler(range(SAMPLES), size, rank, shuffle=False)][:skipped]
    if rank < readers:
        trained += GlobalBatches(SAMPLES, BATCH, rank, readers, **state)
        of_rank += [*DistributedSampler(range(SAMPLES), readers, rank, shuffle=False)][skipped:]
    return {"with_state": count(trained), "skipping": count([of_rank])}


def count(batches: list[list[int]]) -> dict[str, int]:
    """How many samples are more than once in the batches of all ranks, and how many never."""
    positions = torch.tensor([each for batch in batches for each in batch], dtype=torch.int64)
    times = torch.bincount(positions, minlength=SAMPLES)
    dist.all_reduce(times)
    return {"twice": int((times > 1).sum()), "never": int((times == 0).sum())}


def beside_torch(rank: int, size: int) -> dict[str, object]:
    """Save 32 MiB that all ranks hold, by hand and by torch.distributed.checkpoint: the seconds
    that training stands still on the slowest rank.

    `async_save` copies the state, then a thread writes the copy. The thread calls collectives, too,
    so it has a group of its own.
    """
    torch.manual_seed(1234)  # the same on all ranks
    state = {f"layer{index}": torch.randn(1024, 1024) for index in range(8)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    group = dist.new_group(backend="gloo")
    seconds: dict[str, float] = {}
    with shared_folder() as folder:
        ways = {way: folder / way for way in ("by_hand", "dcp", "async_dcp")}
        with timed(seconds, "by_hand"):
            save(ways["by_hand"], {name: cut(tensor) for name, tensor in state.items()})
        with timed(seconds, "dcp"):
            dcp.save(state, checkpoint_id=ways["dcp"], process_group=group)
        with timed(seconds, "async_dcp"):
            written = dcp.async_save(state, checkpoint_id=ways["async_dcp"], process_group=group)
        for tensor in state.values():
            tensor.zero_()  # training may change the state while the thread writes
        written.result()
        equal = {}
        for way, place in ways.items():
            found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            if way == "by_hand":
                load(place, {name: cut(tensor) for name, tensor in found.items()})
            else:
                dcp.load(found, checkpoint_id=place, process_group=group)
            equal[way] = all(torch.equal(found[name], expected[name]) for name in expected)
        sizes = {way: [file.stat().st_size for file in at.iterdir()] for way, at in ways.items()}
    return {
        "ways": {
            way: {
                "seconds": seconds[way],
                "files": len(sizes[way]),
                "mib": round(sum(sizes[way]) / 2**20, 1),
                "equal_bits": equal[way],
            }
            for way in ways
        }
    }


@contextmanager
def timed(seconds: dict[str, float], way: str) -> Iterator[None]:
    dist.barrier()
    begin = time.perf_counter()
    yield
    slowest = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds[way] = round(slowest.item(), 3)
