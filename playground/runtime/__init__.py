"""N processes become one world, and are taken down again whatever happens.

`launch` starts a world on this host; `join` enters one that torchrun, Slurm or a person started. Inside a rank,
`device()` says where tensors live, `report()` tells the launcher how far the rank is, and `restart_count()` says how
often the world has been started anew after a failure.
"""

from playground.runtime.backends import device
from playground.runtime.environment import restart_count
from playground.runtime.errors import (
    ForkServerFailed,
    PeerDisconnected,
    PlaygroundError,
    RankFailed,
    RankTimeout,
    RendezvousTimeout,
    UsageError,
)
from playground.runtime.launch import launch
from playground.runtime.rank import report

__all__ = [
    "ForkServerFailed",
    "PeerDisconnected",
    "PlaygroundError",
    "RankFailed",
    "RankTimeout",
    "RendezvousTimeout",
    "UsageError",
    "device",
    "launch",
    "report",
    "restart_count",
]
