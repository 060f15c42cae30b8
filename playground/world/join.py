"""Enter a world that torchrun, Slurm or a person started: this process is one of its ranks.

Starting the ranks is that launcher's work; ours is to end up with everybody's results, and to say
in one line what went wrong: if another rank was lost first, which, and how.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from playground.base import signals
from playground.base.errors import (
    Deadlock,
    PeerDisconnected,
    PlaygroundError,
    RankFailed,
    has_timed_out,
)
from playground.explain.hang.hooks import hooks
from playground.world import backends
from playground.world.launcher.launch import LaunchConfig
from playground.world.rank import program_groups  # noqa: F401 - it replaces functions of torch's
from playground.world.rank.member import Member
from playground.world.rank.preemption import (
    preempt_on_sigterm,
    raise_if_preempted,
    run_until_preempted,
)
from playground.world.rank.process import finish, forget_frames, run_function
from playground.world.rank.rank import failure
from playground.world.rank.reports import report_to
from playground.world.rendezvous.agreement import all_gather_object
from playground.world.rendezvous.environment import RankEnv, write_error_file
from playground.world.rendezvous.peer_ends import Loss
from playground.world.rendezvous.peers import POLL_INTERVAL, PeerWatch
from playground.world.rendezvous.rendezvous import Server, listen

EXPLANATION_TIMEOUT = 3.0
"""Seconds in which, when a peer has hung up, word must come of which rank was lost."""
HUNG_UP = re.compile(r"Connection timed out|No route to host")
"""Messages of gloo about a lost peer, besides those that `failure` knows."""


def join(
    env: RankEnv, fn: Callable[..., Any], args: tuple[Any, ...], config: LaunchConfig
) -> list[Any]:
    """Run `fn(rank, size, *args)` as the rank that `env` says; return every rank's result, in rank
    order.

    With a grace, SIGTERM leaves the function that many seconds before it ends this process: see
    `preempted()`. All ranks are to agree on it, and to raise `Preempted` together.

    Raises what `launch` raises, `PeerDisconnected` if another rank was lost. After a failure the
    process must end at once (`os._exit`): a process group whose peers are gone cannot be taken down
    in order. If the function is stuck when a rank is lost, in a computation that is not
    torch.distributed's, the process is ended here.

    A `bare` function is a whole program: when it has ended, with its threads and exit functions, so
    may this process, whatever the others do. Rank 0, if it serves the store, first lets them know.
    """
    backend, timeout = backends.get_backend(config.backend), config.timeout
    backend.check(env.local_size, joined=True)
    report_to(partial(config.on_report, env.rank))
    watch = PeerWatch(env, timeout, backend.stuck_limit, lambda: exit_stuck(watch))
    try:
        # The socket to serve the store on, if that is up to this process and all ranks are on this
        # host.
        serves = env.rank == 0 and env.rendezvous.server == Server.RANK_0
        own = serves and env.rendezvous.local
        listener = listen(env.rendezvous.host, env.rendezvous.port) if own else None
        member = Member(env, backend.name, listener, timeout=timeout, joined=True)
        if config.bare:
            member.leave_group_to_program(timeout)
        else:
            member.form_group(timeout)
        watch.start()
        with preempt_on_sigterm(config.grace):
            result = run_until_preempted(run_function, fn, env.rank, env.size, *args)
        if config.bare:
            end_program(watch, serves)
            results = [result]
        else:
            results = gather_and_leave(member, watch, result)
    except BaseException as error:
        if (failed := explain(error, watch)) is error:
            raise
        forget_frames(error)
        raise failed from error
    raise_if_preempted(results)
    return results


def end_program(watch: PeerWatch, serves: bool) -> None:
    """The function was a whole program: leave the others, once its threads and exit functions have
    ended. `serves`: this process serves the store, and waits until nobody needs it."""
    finish()  # exit functions may take part in what others do
    hooks.end_program()
    watch.close()
    if serves:
        watch.await_others()


def gather_and_leave(member: Member, watch: PeerWatch, result: Any) -> list[Any]:
    """Every rank's result, in rank order, with which all leave the world together."""
    hooks.end_program()
    with hooks.paused():  # these calls are not the program's
        results = all_gather_object(result)
        # all leave together, since nccl's communicators end only when their peers' do
        dist.barrier()
        watch.close()
    member.leave()
    return results


def explain(error: BaseException, watch: PeerWatch) -> BaseException:
    """The exception to raise for `error`: the loss of another rank, if that came first. Tells the
    others, and torchrun.

    A signal, and `sys.exit`, stay what they are, unless a rank was lost before.
    """
    watch.handled.set()
    # perhaps because of a loss: the watch looks once more
    if signals.stopping.is_set() and watch.thread.ident:
        watch.thread.join(2 * POLL_INTERVAL)
    if not (isinstance(error, Exception) or watch.known.is_set()):
        watch.closing.set()
        return error
    signals.finish_first()
    failed = failure(error, watch.env.rank, watch.env.size)
    hung_up = isinstance(failed, PeerDisconnected) or HUNG_UP.search(str(error))
    if error is not failed and (
        watch.known.is_set() or (hung_up and watch.known.wait(EXPLANATION_TIMEOUT))
    ):
        failed = describe_loss(watch)
    elif not hung_up:
        why = failed.headline
        if isinstance(failed, RankFailed):
            why = failed.reason.removeprefix("failed: ")
            if has_timed_out(failed.traceback):
                failed.diagnosis = watch.explain()
        watch.report(Loss([watch.env.rank], f"failed on {socket.gethostname()}: {why}"))
    else:  # by one that has ended as it should
        failed.diagnosis = watch.explain_loss()
    watch.await_acknowledged()
    write_error_file(failed)
    return failed


def describe_loss(watch: PeerWatch) -> PlaygroundError:
    """The loss that is known to this rank, in one line; why, on the first that is left; a deadlock
    on rank 0 alone."""
    loss, rank, size = watch.loss, watch.env.rank, watch.env.size
    assert loss
    if loss.deadlock and rank == 0:
        return Deadlock(size, 0.0, {}, loss.deadlock)
    words = str(loss)
    if loss.deadlock:
        words = "ends with the others"
    elif rank in loss.ranks:
        words = f"was given up by the others: {loss.reason}"
    failed = PeerDisconnected(rank, size, words)
    left = [one for one in range(size) if one not in loss.ranks]
    if left and rank == left[0] and not loss.deadlock:
        failed.diagnosis = watch.explain_loss()
    return failed


def exit_stuck(watch: PeerWatch) -> NoReturn:
    """End this process after a loss: its main thread does not get to it."""
    failed = describe_loss(watch)
    watch.await_acknowledged()
    write_error_file(failed)
    with contextlib.suppress(OSError):
        print(f"playground: {failed}", file=sys.stderr, flush=True)
    os._exit(failed.exit_code)
