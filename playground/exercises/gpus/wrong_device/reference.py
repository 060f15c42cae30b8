import torch
import torch.distributed as dist

SEED = 0
RANK = 3


def wrong_device(
    rank: int,
    size: int,
    gpus: list[int],
    batches: list[torch.Tensor],
) -> float:
    """Return the sum of all ranks' batches, each times its place from 1 on.

    A rank computes on its own GPU, which has the number gpus[rank].
    """
    device = torch.device("cuda", gpus[rank])
    total = torch.zeros(1, device=device)
    for place, batch in enumerate(batches):
        weights = torch.full(batch.shape, place + 1.0, device=device)
        total += (weights * batch.to(device)).sum()
    everyones = total.cpu()
    dist.all_reduce(everyones)
    return float(everyones)
