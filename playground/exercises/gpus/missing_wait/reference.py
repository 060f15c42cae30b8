import torch
import torch.distributed as dist


def missing_wait(
    rank: int,
    size: int,
    gradient: torch.Tensor,
    handle: dist.Work,
    side: torch.cuda.Stream,
) -> None:
    """Divide the sum of the gradients by the number of ranks, in `side`.

    handle: the all-reduce that sums `gradient` over all ranks in place.
    The caller reads `gradient` afterwards, in the current stream.
    """
    # write this
    with torch.cuda.stream(side):
        handle.wait()
        gradient /= size
    torch.cuda.current_stream().wait_stream(side)
    # until here
