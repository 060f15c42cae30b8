"""Everything that draws from a generator of the CPU, whatever the default device is.

python -m playground devices
"""

import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)


def seeded():
    return torch.Generator().manual_seed(1)


def show(name, loader):
    batches = [numbers for (numbers,) in loader]
    assert all(each.device == torch.get_default_device() for each in batches)
    print(name, [number for batch in batches for number in batch.tolist()])


def run(rank, size):
    data = TensorDataset(torch.tensor([float(number) for number in range(8)]))
    show("shuffled", DataLoader(data, batch_size=3, shuffle=True, generator=seeded()))
    assert len([*DataLoader(data, shuffle=True)]) == 8  # by a seed of its own
    show("distributed", DataLoader(data, batch_size=2, sampler=DistributedSampler(data, seed=1)))
    again = RandomSampler(data, replacement=True, generator=seeded())
    show("replaced", DataLoader(data, batch_size=3, sampler=again))
    weighted = WeightedRandomSampler([0.1] * 8, 8, generator=seeded())
    show("weighted", DataLoader(data, batch_size=4, sampler=weighted))
    for part in random_split(data, [5, 3], generator=seeded()):
        show("split", DataLoader(part, batch_size=2))
    show("from workers", ([batch[0].to(torch.get_default_device())] for batch in in_workers()))
    drawn = torch.randn(2, generator=seeded(), requires_grad=True)
    assert drawn.is_leaf
    assert drawn.requires_grad
    print("drawn", drawn.tolist())
    print("filled", torch.zeros(2).uniform_(generator=seeded()).tolist())
    total = torch.ones(1)
    dist.all_reduce(total)
    print("summed", total.item(), "on", total.device)


def in_workers():
    """What a worker makes is on the CPU."""
    return DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="fork")


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return (torch.tensor(float(index**2)),)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("backend", dist.get_backend(), "on", torch.get_default_device())
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
