"""A playground of distributed primitives, in the order in which tutorials teach them. README.md
beside this file says which room has what.

From a script, a test or a notebook:

    from playground import launch
    launch(fn, 2)    # runs fn(rank, size) on two ranks and returns their results in rank order

What the ranks train is checked for silent mistakes, unless `check=False` is given.

A rank tells how far it is with `report(step=3)`. With `launch(fn, 2, restarts=3)`, a world that
fails is restarted, three times at most, and `restart_count()` tells a rank how often it was. With
`launch(fn, 2, grace=30)`, SIGTERM gives the ranks 30 s to store their state: see `preempted()`.
What `launch` raises is a `PlaygroundError`:

    UsageError           what was asked cannot be done; nothing was started
    RankFailed           a rank raised, died or left without a result: .rank, .reason, .traceback
      PeerDisconnected   … because another rank hung up on it
    RankTimeout          no rank reported progress for `timeout` seconds: .stacks says where each is
      Deadlock           … and none can: ranks wait for each other. Raised at once: .diagnosis
    ProgramRefused       every rank of a program ended by an assertion or by `sys.exit`, with words
    RendezvousTimeout    the ranks did not find each other in time
    ForkServerFailed     the process that forks ranks was killed, is stopped, or could not start one
    StoreFailed          the process through which ranks meet was killed, or has failed
    Preempted            the ranks were asked to end and did, and stored the .step they had reached

Importing this package imports nothing and changes nothing.
"""

TYPE_CHECKING = False  # typing would be imported for nothing
if TYPE_CHECKING:
    from playground.explain.right.launch import launch
    from playground.world import (
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
        preempted,
        report,
        restart_count,
    )

__all__ = [
    "Deadlock", "ForkServerFailed", "PeerDisconnected", "PlaygroundError", "Preempted",
    "ProgramRefused", "RankFailed", "RankTimeout", "RendezvousTimeout", "StoreFailed", "UsageError",
    "launch", "preempted", "report", "restart_count",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import what this package exports when it is first asked for: pytest imports the package in
    every run of whoever has it installed, for the sake of the plugin."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from playground import world

    value = getattr(world, name)  # says what this machine lacks, if it can have no ranks
    if name == "launch":
        from playground.explain.right import launch

        return launch.launch
    return value


def load_ipython_extension(shell: object) -> None:
    """%load_ext playground: cells of a notebook run on ranks, from `%ranks` on. Raises IPython's
    `UsageError`, which it shows in a line, where no rank can be started."""
    from playground.base.process_checks import find_obstacle

    if obstacle := find_obstacle():
        from IPython.core.error import UsageError

        raise UsageError(obstacle)
    from playground.play.extension import load

    load(shell)
