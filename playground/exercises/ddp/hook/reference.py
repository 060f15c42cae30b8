import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Averaged = torch.futures.Future[torch.Tensor]


def hook(
    rank: int,
    size: int,
    model: DistributedDataParallel,
    inputs: torch.Tensor,
) -> None:
    """Go backward through `model`, whose gradients a hook of yours averages:
    they travel as float16.
    """

    def average(state: object, bucket: dist.GradBucket) -> Averaged:
        # write this
        compressed = bucket.buffer().half()
        request = dist.all_reduce(compressed, async_op=True)

        def decompress(future: torch.futures.Future) -> torch.Tensor:
            return bucket.buffer().copy_(future.value()[0]).div_(size)

        return request.get_future().then(decompress)
        # until here

    model.register_comm_hook(None, average)
    model(inputs).sum().backward()
