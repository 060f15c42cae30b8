from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn


def overlap(
    rank: int,
    size: int,
    model: nn.Module,
    loss: torch.Tensor,
    step: Callable[[], None],
) -> None:
    """Run `loss.backward()`, average the gradients, and call `step()`.

    Before the step, which changes the parameters, every `grad` is its mean over
    all ranks. All-reduces run during backward. Where a rank has no gradient
    (None), it counts as zeros.
    """
    params = [*model.parameters()][::-1]
    works: dict[nn.Parameter, dist.Work] = {}
    # write this
    ready = set()

    def collect(param: nn.Parameter) -> None:
        ready.add(param)
        while len(works) < len(params) and params[len(works)] in ready:
            following = params[len(works)]
            works[following] = dist.all_reduce(following.grad, async_op=True)

    hooks = []
    for param in params:
        hooks.append(param.register_post_accumulate_grad_hook(collect))
    loss.backward()
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        collect(param)
    for param, work in works.items():
        work.wait()
        param.grad /= size
    for hook in hooks:
        hook.remove()
    step()
    # until here
