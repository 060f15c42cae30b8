from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn


def early(
    rank: int,
    size: int,
    model: nn.Module,
    loss: torch.Tensor,
    step: Callable[[], None],
) -> None:
    """Run `loss.backward()`, average the gradients, and call `step()`.

    Before the step, which changes the parameters, every `grad` is its mean over
    all ranks. All-reduces run during backward. All ranks use all parameters.
    """
    # write this
    works: dict[nn.Parameter, dist.Work] = {}

    def start(param: nn.Parameter) -> None:
        works[param] = dist.all_reduce(param.grad, async_op=True)

    hooks = []
    for param in model.parameters():
        hooks.append(param.register_post_accumulate_grad_hook(start))
    loss.backward()
    for param, work in works.items():
        work.wait()
        param.grad /= size
    for hook in hooks:
        hook.remove()
    step()
    # until here
