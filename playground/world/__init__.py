"""N processes become one world, and are taken down again whatever happens.

`launch` starts a world on this host; `join` enters one that torchrun, Slurm or a person started.
Inside a rank, `device()` says where tensors live, `on_device()` lets torch make them there,
`synchronize()` waits until it has done its work, `report()` tells the launcher how far the rank is,
`restart_count()` says how often the world was restarted after a failure, and `preempted()` whether
it is asked to end soon.

Begin with `launcher.launch`.

launcher       starts ranks, watches them, ends them, and shows what they print
rank           what a rank of ours does: its start, its reports, its end
rendezvous     the store, the ranks' addresses, and who takes part
backends       gloo and nccl: their devices, and what they lack
simulated_gpu  GPUs that are not there
command_world  the world of a command: launched, or joined
join           enters a world that somebody else has started
program        the file or module that ranks run as `__main__`

Importing this package imports nothing: the lessons' table needs none of it, so that a lesson's
program that imports another runs under torchrun where no rank of ours can be started.
"""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from playground.base.errors import (
        Deadlock,
        ForkServerFailed,
        PeerDisconnected,
        PlaygroundError,
        Preempted,
        ProgramRefused,
        RankFailed,
        RankTimeout,
        RendezvousTimeout,
        StoreFailed,
        UsageError,
    )
    from playground.world.backends import device, on_device, synchronize
    from playground.world.launcher.launch import launch
    from playground.world.rank.preemption import preempted
    from playground.world.rank.reports import report
    from playground.world.rendezvous.environment import restart_count

__all__ = [
    "Deadlock", "ForkServerFailed", "PeerDisconnected", "PlaygroundError", "Preempted",
    "ProgramRefused", "RankFailed", "RankTimeout", "RendezvousTimeout", "StoreFailed", "UsageError",
    "device", "launch", "on_device", "preempted", "report", "restart_count", "synchronize",
]  # fmt: skip
HOMES = {
    "device": "backends",
    "launch": "launcher.launch",
    "on_device": "backends",
    "preempted": "rank.preemption",
    "report": "rank.reports",
    "restart_count": "rendezvous.environment",
    "synchronize": "backends",
}
"""The module of each function. Errors come from `base.errors`."""


def __getattr__(name: str) -> object:
    """Import what this package exports when it is first asked for. Raises `UsageError` where no
    rank can be started."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from playground.base import errors
    from playground.base.process_checks import find_obstacle

    if obstacle := find_obstacle():
        raise errors.UsageError(obstacle)
    home = import_module(f"{__name__}.{HOMES[name]}") if name in HOMES else errors
    value: object = getattr(home, name)
    globals()[name] = value
    return value
