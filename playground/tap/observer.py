"""Who is told of calls: an `Observer` of all that is known of them, a `FastObserver` of the
least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from playground.tap.call import Call
from playground.tap.replacement import Wrap


class Observer:
    """Is told what this rank calls, from `observing` on: see `playground.tap`."""

    looks_at_calls = True
    """Whether it is told of calls."""
    looks_inside = False
    """Whether it is also told what torch does by itself: of calls in C++ that they begin, return
    and complete, of waits that Python sees, and of backward passes."""
    looks_at_ends = True
    """Whether one that looks inside is told `completed` of calls from Python, too: each costs a
    callback."""
    looks_at_training = False
    """Whether it is also told of backward passes, models, samples, batches and files."""

    # of calls

    def begun(self, call: Call) -> None: ...

    def returned(self, call: Call) -> None: ...

    def waiting(self, calls: Sequence[Call]) -> None: ...

    def waited(self, calls: Sequence[Call]) -> None: ...

    def done(self, calls: Sequence[Call]) -> None: ...

    def failed(self, calls: Sequence[Call], error: BaseException) -> None: ...

    def dropped(self, calls: Sequence[Call]) -> None: ...

    # who looks inside

    def completed(self, call: Call) -> None:
        """The backend has done an asynchronous call. On a GPU, its stream waits for the call. The
        thread is the backend's, which must not wait."""

    # who looks inside, or at training

    def backward_begun(self, root: Any) -> None:
        """A backward pass begins in this thread, from this tensor or these."""

    def backward_ended(self) -> None:
        """It has ended, and so has what it started and did not hand out."""

    # who looks at training

    def model_wrapped(self, model: DistributedDataParallel) -> None:
        """A model has been wrapped, and its replicas are equal."""

    def model_called(self, model: DistributedDataParallel, args: Sequence[Any]) -> None:
        """The forward pass of a wrapped model begins."""

    def model_loaded(self, module: nn.Module) -> None:
        """A module's `load_state_dict` has returned."""

    def samples_drawn(self, sampler: DistributedSampler[Any]) -> None:
        """An iteration over a sampler begins."""

    def batch_loaded(self, iterator: Any, batch: Any) -> None:
        """An iterator of a data loader returns a batch."""

    def called_from_outside(self, operation: str) -> None:
        """A function of torch.distributed was called for a group that this rank is not in: torch
        warns, and does nothing."""

    def file_saved(self, file: Any, saved: Any) -> None:
        """`torch.save` has written this into a file, given by its path or open."""

    def file_loaded(self, file: Any) -> None:
        """`torch.load` is about to read a file, given by its path or open."""


class FastObserver:
    """Is told of each call nearest to torch's own method, and has to be fast: it is asked once what
    to call in the method's place. This one records nothing."""

    def __init__(self) -> None:
        self.places: dict[tuple[Any, str], Wrap] = {}
        """Further functions that it replaces, by owner and name."""

    def wrap_operation(self, method: str, real: Callable[..., Any]) -> Recorded:
        return lambda group, given, args, kwargs: real(group, *args, **kwargs)

    def wrap_wait(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return real


Recorded = Callable[[Any, "Sequence[Any] | None", tuple[object, ...], dict[str, object]], Any]
"""Makes a call: of the group, the arguments as `by_position` has them, and those as given."""
