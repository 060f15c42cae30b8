"""Where every call of torch.distributed passes: the methods of `ProcessGroup`, and those of `Work`.

Functions of torch.distributed call these, and so do our algorithms and remote calls. As long as
nobody observes or records, torch's own methods are in place. An `Observer` is told, in the thread
where it happens:

- `begun(call)`: the rank is about to call an operation. A `Call` says what is known of it: the
  operation, the group and its ranks, the tensors in and out, the peer or the root, the tag, and
  whether the program waits in it.
- `returned(call)`: the method of the group has returned; the operation may go on.
- `waiting(calls)`, `waited(calls)`: the program waits for a work, that of one call or, where a
  backend makes one work of a batch, of several. A call that blocks waits in itself: of that nothing
  is told but `done`.
- `done(calls)`: they are over, and what they have received is there: once for each, and before the
  program knows.
- `failed(calls, error)`: the call, or the wait for it, has raised.
- `dropped(calls)`: the program has let go of the work without having waited for the end.

The thread is the current one, and the program's line is found from there by
`explain.hang.sources`. The flight recorder has to be faster than that, and is told in another way:
see `FastObserver`. What DistributedDataParallel averages in C++ calls no method of Python's: only
an observer that `looks_inside` is told of it, see `native`. What a training program does besides,
with its models and its data, an observer that `looks_at_training` is told.

    tap          stands in the place of torch's methods, and tells observers
    observer     who is told: `Observer` and `FastObserver`
    call         a call, as observers are told of it
    methods      the methods of `ProcessGroup` that are operations, and their arguments
    inside       what torch does by itself: its calls in C++, its waits
    native       the calls in C++ that no method of Python's sees
    training     what a training program does besides: models, samples, batches, files
    replacement  puts a function in the place of another module's
"""

from playground.tap.call import Call, number_of, ranks_of
from playground.tap.methods import MESSAGES, METHODS
from playground.tap.observer import Observer
from playground.tap.tap import observing

__all__ = ["MESSAGES", "METHODS", "Call", "Observer", "number_of", "observing", "ranks_of"]
