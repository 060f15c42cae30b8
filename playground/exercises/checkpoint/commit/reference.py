from collections.abc import Callable

import torch.distributed as dist


def commit(
    rank: int,
    size: int,
    write_blocks: Callable[[], None],
    write_index: Callable[[], None],
) -> None:
    """Write a checkpoint that is whole or absent: it is there with its index.

    write_blocks: writes what this rank holds, and returns when that is on the
    disk; each rank calls it once. write_index: says what is in the files of all
    ranks; one rank calls it once. The checkpoint is there when this returns.
    """
    # write this
    write_blocks()
    dist.barrier()
    if rank == 0:
        write_index()
    dist.barrier()
    # until here
