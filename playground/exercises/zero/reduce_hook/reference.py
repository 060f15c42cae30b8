import torch
import torch.distributed as dist
from torch import nn


def reduce_hook(
    rank: int,
    size: int,
    model: nn.Module,
    loss: torch.Tensor,
) -> None:
    """Run `loss.backward()`; meanwhile each gradient goes to its owner.

    Parameter k belongs to rank k % size: there its `grad` is the mean over all
    ranks, on the others None. Where a rank has no gradient, it counts as zeros.
    """
    params = [*model.parameters()]
    waiting = [*enumerate(params)][::-1]
    # write this
    ready = set()

    def collect(param: nn.Parameter) -> None:
        ready.add(param)
        while waiting and waiting[0][1] in ready:
            number, following = waiting.pop(0)
            dist.reduce(following.grad, dst=number % size)
            if number % size == rank:
                following.grad /= size
            else:
                following.grad = None

    hooks = []
    for param in params:
        hooks.append(param.register_post_accumulate_grad_hook(collect))
    loss.backward()
    while waiting:
        param = waiting[0][1]
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        collect(param)
    for hook in hooks:
        hook.remove()
    # until here
