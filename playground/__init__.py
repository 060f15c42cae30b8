"""A playground of distributed primitives, in the order in which tutorials teach them.

    lessons/      the path, a folder for each chapter, from hello to pipeline
    exercises/    exercises that check themselves, a folder each
    tools/        commands beside the path: bench, scale, break, why, doctor
    site/         the course as static pages
    trace/        a recorded run: record, analyse, render and play it; the figures of the tutorials
    remote/       remote calls by send and recv
    algorithms/   our own all-reduce, an algorithm a file, and what carries its messages
    checkpoint/   snapshots of a training run: written atomically, read back
    training/     what lessons that train share: partition, data, net, the training step, gradient synchronisation
    measurement/  timing side by side, and the machine it was done on
    runtime/      N processes become one world: launch(), rendezvous, backends, failures
    console/      what every command shares: options, tables, progress, JSON
    play/         a prompt and a notebook whose cells run on ranks that stay
    app           the command line put together
    testing       the pytest plugin: real ranks for your own tests

From a script, a test or a notebook:

    from playground import launch
    launch(fn, 2)    # runs fn(rank, size) on two ranks, returns [result of rank 0, result of rank 1]

A rank tells how far it is with `report(step=3)`. With `launch(fn, 2, restarts=3)`, a world that
fails is restarted, three times at most, and `restart_count()` tells a rank how often it was. With
`launch(fn, 2, grace=30)`, SIGTERM gives the ranks 30 s to store where they are: see `preempted()`.
What `launch` raises is a `PlaygroundError`:

    UsageError           what was asked cannot be done; nothing was started
    RankFailed           a rank raised, died or left without a result: .rank, .reason and its .traceback
      PeerDisconnected   … because another rank hung up on it
    RankTimeout          no rank gave a sign of life for `timeout` seconds: .stacks says where each one stands
      Deadlock           … and none can: ranks wait for each other. Raised at once, with a .diagnosis
    RendezvousTimeout    the ranks did not find each other in time
    ForkServerFailed     the process that ranks come from was killed, is stopped, or could not start one
    Preempted            the ranks have ended because they were asked to, and stored the .step they had reached

Importing this package imports nothing and changes nothing.
"""

TYPE_CHECKING = False  # typing would be imported for nothing
if TYPE_CHECKING:
    from playground.runtime import (
        Deadlock,
        ForkServerFailed,
        PeerDisconnected,
        PlaygroundError,
        Preempted,
        RankFailed,
        RankTimeout,
        RendezvousTimeout,
        UsageError,
        launch,
        preempted,
        report,
        restart_count,
    )

__all__ = [
    "Deadlock", "ForkServerFailed", "PeerDisconnected", "PlaygroundError", "Preempted",
    "RankFailed", "RankTimeout",
    "RendezvousTimeout", "UsageError", "launch", "preempted", "report", "restart_count",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import what this package exports when it is first asked for: pytest imports the package in
    every run of whoever has it installed, for the sake of the plugin."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from playground import runtime

    return getattr(runtime, name)


def load_ipython_extension(shell: object) -> None:
    """%load_ext playground: cells of a notebook run on ranks, from `%ranks` on."""
    from playground.play.extension import load

    load(shell)
