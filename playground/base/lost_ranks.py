"""What is done in this process when a rank is lost. Ranks can wait for each other outside
torch.distributed, in memory that they share: these waits must end, too. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable

_calls: list[Callable[[], object]] = []


def when_lost(call: Callable[[], object]) -> Callable[[], object]:
    """Have `end_waits` make this call, too: a decorator. The call must not raise, and it must not
    block."""
    _calls.append(call)
    return call


def end_waits() -> None:
    """Wake whoever waits for a rank outside torch.distributed, with an error. A rank calls this
    when it has failed, and when it hears that another rank is lost."""
    for call in _calls:
        call()
