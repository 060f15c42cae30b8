"""N processes become one world, and are taken down again whatever happens.

`launch` starts a world on this host; `join` enters one that torchrun, Slurm or a person started.
Inside a rank, `device()` says where tensors live, `on_device()` lets torch make them there,
`synchronize()` waits until it has done its work, `report()` tells the launcher how far the rank is,
`restart_count()` says how often the world was restarted after a failure, and `preempted()` whether
it is asked to end soon.
"""

from playground.runtime.backends import device, on_device, synchronize
from playground.runtime.errors import (
    Deadlock,
    ForkServerFailed,
    PeerDisconnected,
    PlaygroundError,
    Preempted,
    RankFailed,
    RankTimeout,
    RendezvousTimeout,
    UsageError,
)
from playground.runtime.launcher.launch import launch
from playground.runtime.rank.preemption import preempted
from playground.runtime.rank.rank import report
from playground.runtime.rendezvous.environment import restart_count

__all__ = [
    "Deadlock", "ForkServerFailed", "PeerDisconnected", "PlaygroundError", "Preempted",
    "RankFailed", "RankTimeout", "RendezvousTimeout", "UsageError", "device", "launch",
    "on_device", "preempted", "report", "restart_count", "synchronize",
]  # fmt: skip
