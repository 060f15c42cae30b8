"""N processes become one world, and are taken down again whatever happens.

`launch` starts a world on this host; `join` enters one that torchrun, Slurm or a person started. Inside a rank,
`device()` says where tensors live and `report()` tells the launcher how far the rank is.
"""

from playground.runtime.backends import device
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
]
