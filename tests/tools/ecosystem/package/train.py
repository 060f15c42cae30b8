import os
import sys

import torch
import torch.distributed as dist

from . import settings
from .settings import LR

if __name__ == "__main__":
    dist.init_process_group("gloo")
    one = torch.full((1,), LR * settings.FACTOR)
    dist.all_reduce(one)
    told = [__package__, __spec__.name, sys.argv[1:], os.path.basename(sys.argv[0])]
    print(f"{one.item():.3f} {told}\n", end="", flush=True)
    dist.destroy_process_group()
