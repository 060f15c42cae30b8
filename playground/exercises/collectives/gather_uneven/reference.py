import torch
import torch.distributed as dist


def gather_uneven(
    rank: int,
    size: int,
    tensor: torch.Tensor,
) -> list[torch.Tensor]:
    """All ranks' tensors, on every rank.

    They differ in length, and a rank knows its own length only.
    """
    # write this
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(tensor)]))
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=tensor.dtype)
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded)
    pairs = zip(gathered, lengths, strict=True)
    return [each[: int(length)] for each, length in pairs]
    # until here
