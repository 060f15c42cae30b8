import torch
import torch.distributed as dist
from torch import nn

SEED = 0
RANK = 3


def drift(
    rank: int,
    size: int,
    model: nn.Module,
    batches: list[torch.Tensor],
    limit: float,
) -> None:
    """Train replicas with clipped mean gradients: a step for each batch."""
    params = list(model.parameters())
    for batch in batches:
        model.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        for param in params:
            dist.all_reduce(param.grad)
            param.grad /= size
        norm = nn.utils.get_total_norm([param.grad for param in params])
        with torch.no_grad():
            for param in params:
                param -= 0.1 * param.grad * min(1.0, limit / norm.item())
