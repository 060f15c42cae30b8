import os

import torch.distributed as dist


def whoami() -> dict[str, int]:
    """This process's rank, the size of its world, and the number of its node.

    Each node has LOCAL_WORLD_SIZE ranks.
    """
    # write this
    rank = dist.get_rank()
    size = dist.get_world_size()
    node = rank // int(os.environ["LOCAL_WORLD_SIZE"])
    return {"rank": rank, "size": size, "node": node}
    # until here
