"""N processes become one world, and are taken down again whatever happens.

`launch` starts a world on this host; `join` enters one that torchrun, Slurm or a person started.
Inside a rank, `device()` says where tensors live, `on_device()` lets torch make them there,
`synchronize()` waits until it has done its work, `report()` tells the launcher how far the rank is,
`restart_count()` says how often the world was restarted after a failure, and `preempted()` whether
it is asked to end soon.

Importing this package imports nothing: the lessons' table needs none of it, so that a board that
imports another runs under torchrun where no rank of ours can be started.
"""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from playground.runtime.backends import device, on_device, synchronize
    from playground.runtime.errors import (
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
    from playground.runtime.launcher.launch import launch
    from playground.runtime.rank.preemption import preempted
    from playground.runtime.rank.reports import report
    from playground.runtime.rendezvous.environment import restart_count

__all__ = [
    "Deadlock", "ForkServerFailed", "PeerDisconnected", "PlaygroundError", "Preempted",
    "ProgramRefused", "RankFailed", "RankTimeout", "RendezvousTimeout", "StoreFailed", "UsageError",
    "device", "launch", "on_device", "preempted", "report", "restart_count", "synchronize",
]  # fmt: skip
HOMES = (
    *("errors", "backends", "rank.reports", "rank.preemption", "rendezvous.environment"),
    "launcher.launch",
)
"""The modules in which these are, the quickest to import first."""


def __getattr__(name: str) -> object:
    """Import what this package exports when it is first asked for. Raises `UsageError` where no
    rank can be started."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from playground.runtime.errors import UsageError
    from playground.runtime.surroundings import find_obstacle

    if obstacle := find_obstacle():
        raise UsageError(obstacle)
    homes = (import_module(f"{__name__}.{home}") for home in HOMES)
    value: object = next(vars(home)[name] for home in homes if name in vars(home))
    globals()[name] = value
    return value
