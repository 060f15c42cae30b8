import os

import torch


def own_gpu(rank: int, size: int) -> torch.Tensor:
    """Choose this rank's GPU, and return the rank as a tensor on it.

    Afterwards "cuda" stands for this GPU. The launcher has set LOCAL_RANK.
    """
    # write this
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.tensor(rank, device="cuda")
    # until here
