"""The interface of a backend: everything in which backends differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from playground.base import upstream

if TYPE_CHECKING:
    import torch


class Backend:
    """A backend of torch.distributed. The defaults suit one without special needs."""

    name: str
    """The name that `init_process_group` has for it."""
    device_type: str
    """Where its tensors live: "cpu" or "cuda"."""
    summary: str
    interface_variable: str
    """The environment variable that names the network interface it may use."""
    trusts_host_name = False
    """Whether, left to itself, it takes the interface that its host's name resolves to, on many
    machines loopback."""
    log_level = "FATAL"
    """Level of torch's C++ log (TORCH_CPP_LOG_LEVEL). Logged errors are also raised, and we report
    them once."""
    batches_messages = False
    """Whether the messages of one step must be started together, by `batch_isend_irecv`."""
    allows_threads = True
    """Whether a second thread may communicate while the first one does."""
    may_be_kept = True
    """Whether a process can form one process group of this backend after the other as well as new
    processes can."""
    stuck_limit = 3.0
    """Seconds in which a thread that waits for a lost peer gets out of it, once all connections are
    shut down."""
    loads_kernels_late = False
    """Whether a kernel's first launch waits until its device is idle, which beside a receive it may
    never be."""
    may_differ = ""
    """Why the same computation may end with other bits when it is repeated on its device; empty if
    it does not."""
    deaths: Mapping[int, str] = MappingProxyType({})
    """Meaning of a rank's death by one of these signals, where it is more than the signal's
    name."""
    lacks_device: str = ""
    """Errors of torch 2.13 to 2.15 where a program asks for this backend, and the machine has no
    device for it (a regular expression); empty if every machine has one."""
    shared_device: str = ""
    """The error where two ranks use one device, with groups for both ranks; empty if they may."""
    cures: Mapping[str, str] = MappingProxyType({})
    """What to do about errors of torch 2.13 to 2.15 (regular expressions), where torch does not say
    it."""
    refusals: tuple[str, ...] = (
        "does not support",
        "not supported",
        "only implemented for",
        "Cannot use ReduceOp",
        "can't be cast",
        "[Uu]nsupported",
        "Unhandled ReduceOp",
        "Invalid data type",
    )
    """Errors of torch 2.13 to 2.15 for an operation that this backend does not support (regular
    expressions)."""

    def find_cure(self, error: str) -> str:
        """What to do about an error with this message; empty if that is not known."""
        found = (cure for pattern, cure in self.cures.items() if re.search(pattern, error))
        return next(found, "")

    def check(self, local_ranks: int, joined: bool = False) -> str:
        """A notice for the user about `local_ranks` ranks on this machine, usually empty.

        `joined`: somebody else has started the ranks and may have given each of them a device of
        its own. Raises `UsageError` for what this machine cannot do.
        """
        return ""

    def claim_device(
        self, local_rank: int, local_ranks: int, joined: bool = False
    ) -> torch.device | None:
        """Make a device this rank's own, before the world is entered; None if there is nothing to
        choose."""
        return None

    def device(self) -> torch.device:
        """Where this rank's tensors live, inside a world."""
        import torch

        return torch.device(self.device_type)

    def connects_later(self) -> bool:
        """Whether ranks connect to each other also when their process group is formed already."""
        return False

    def synchronize(self) -> None:
        """Wait until this rank's device has done what it was given. A clock that is read before, or
        a process group that is destroyed before, does not wait for that."""

    def abort_groups(self) -> None:
        """Have the operations of all process groups of this process raise, from another thread,
        where to end their connections does not."""

    def describe_overlap(self) -> str:
        """The known reason why this rank's DistributedDataParallel cannot hide messages behind
        backward, if any; inside a world."""
        return ""

    def refusal(self, error: Exception) -> str:
        """Its own words if `error` says that it cannot do an operation at all; empty for any other
        error."""
        first_line = str(error).splitlines()[0] if str(error) else ""
        return first_line if re.search("|".join(self.refusals), first_line) else ""

    def explain_init_failure(self, error: Exception) -> str:
        """In one line, why this backend could not form a process group."""
        return (str(error).strip() or repr(error)).splitlines()[-1]

    def implementation(self) -> str:
        """The class in torch that does the work, inside a world. One name may stand for several, as
        nccl does."""
        import torch.distributed as dist

        return type(upstream.carrier_of(dist.group.WORLD, self.device())).__name__

    def libraries(self) -> dict[str, object]:
        """Versions of what it is built on, beside torch: plain data."""
        return {}
