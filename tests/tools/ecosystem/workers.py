import multiprocessing

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Numbers(Dataset):
    unpicklable = lambda self: None  # noqa: E731

    def __len__(self):
        return 37

    def __getitem__(self, index):
        return torch.full((8,), index / 37)


def square(number):
    return number**2


if __name__ == "__main__":
    from common import dist, new_ddp, rank, say, sgd, total  # not in the spawned process

    model, data = new_ddp(), Numbers()
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    optimizer = sgd(model)
    for options in ({"persistent_workers": True, "prefetch_factor": 4}, {"worker_init_fn": print}):
        loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2, **options)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in loader:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        say(total(model), len(loader))
    with multiprocessing.Pool(2) as pool:
        say(sum(pool.map(square, range(10))))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        say(sum(pool.map(square, range(rank, rank + 10))))
    dist.destroy_process_group()
