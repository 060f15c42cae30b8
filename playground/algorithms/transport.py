"""The interface that our algorithms require of a message transport.

The one that is used for a process group is found in `playground.algorithms.transports`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from playground.algorithms.hosts import Hosts
    from playground.runtime.shared_memory import Segment

Addressed = tuple["torch.Tensor", int]
"""(what, the rank it goes to or comes from). The rank is the one within the group."""


class Started(Protocol):
    """Messages under way."""

    def received(self) -> None:
        """Wait until what was to be received is there."""

    def sent(self) -> None:
        """Wait until what was to be sent may be written again."""


class Transport(Protocol):
    """This rank's connections to the other ranks of one group.

    Messages between two ranks arrive in the order in which they were started.
    """

    rank: int
    """This rank's number in the group."""
    size: int
    """Number of ranks in the group."""
    batched: bool
    """Whether the messages of one `start` form a batch, which both ends must start alike."""
    allows_threads: bool
    """Whether a second thread may communicate while the first one does."""

    def start(self, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Started:
        """Start these messages, none of them empty, without waiting for any.

        Tensors are flat and contiguous. Until they are finished, what is sent must not be written and what is received
        must not be read.
        """
        ...

    def hosts(self, device: torch.device) -> Hosts:
        """Which ranks of the group share a host; `device` is where its messages lie.

        All ranks must call this at the same point. The answer must be kept, as it takes messages to find it.
        """
        ...

    def segment(self, device: torch.device) -> Segment | str:
        """The memory that this rank shares with those of its host; why not, where any rank has none. As for `hosts`."""
        ...
