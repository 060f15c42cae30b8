"""Inside a rank that the launcher started: run the function, report to the launcher, follow its
orders.

| rank → launcher              | launcher → rank                                      |
|------------------------------|------------------------------------------------------|
| `("up",)`                    | `Assignment`: run this                               |
| `("report", event)`          | `"where"`: answer with `("stack", text, activity)`   |
| `("result", pickled, list)`  | `"leave"`: every rank has its result                 |
| `("failed", error)`          | `"end"`: you are asked to, soon (`preempted()`)      |
| `("box", file)`              | `"opened"`: the box, so it may go with this process  |
|                              | `"abort"`: end what waits for other ranks            |
| `("ask", prompt)`            | `Answer`: to its question                            |
|                              | `"interrupt"`: raise KeyboardInterrupt, if it is up  |
|                              | `"interrupt all"`: so do your processes, as by a     |
|                              | terminal; `"leave"` lets one go that has failed      |
|                              | end of file: the launcher is gone, go at once        |

The messages are pickles: results, reports and exceptions are the program's own objects. No program
that the rank starts has the line, and no fork of it. The launcher asks the kernel who has sent each
message: it hears the rank's process alone, and takes plain data of one that has given its rights
away.

A rank that failed does not leave by itself: it keeps its sockets open until the launcher stops it,
so that no peer fails only because it is gone, and the first failure to be reported is the first
that happened. A rank that has handed in its result waits too: for the order to leave, or for more
work. But a `bare` one, whose function is a whole program, ends when that does: its result is handed
in when its threads and its exit functions have come to their end, which may still take part in what
others do.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import sys
import threading
import traceback
from bdb import BdbQuit
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from playground.base import signals
from playground.base.connections import break_off_connecting, shut_down_groups
from playground.base.errors import (
    FAILS,
    LOST_PEER,
    PeerDisconnected,
    PlaygroundError,
    RankFailed,
    UsageError,
)
from playground.base.forks import close_in_children, keep_from_programs
from playground.base.frames import RUNNERS, is_program
from playground.base.gpu_names import find_named_gpus
from playground.base.lost_ranks import end_waits
from playground.base.threads import OurThread, signals_blocked
from playground.explain.hang.activity import look
from playground.explain.hang.box import NESTED, find_place, say_innermost
from playground.world import backends
from playground.world.rank.assignment import Answer, Assignment, MessageKind, Order, call
from playground.world.rank.preemption import (
    clear_preemption,
    leave_to_launcher,
    request_preemption,
    run_until_preempted,
)
from playground.world.rank.process import (
    end,
    exit_orderly,
    finish,
    flush,
    forget_frames,
    run_function,
)
from playground.world.rank.reports import QUIT, report_to
from playground.world.rendezvous.environment import RankEnv

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from playground.world.rank.member import Member
    from playground.world.rank.process_state import ProcessState

NO_GRADIENT = re.compile(r"did not receive grad for rank (\d+): ([\d ]+)")
"""In what DistributedDataParallel raises (torch 2.13 to 2.15)."""
TWO_DEVICES = "Expected all tensors to be on the same device"
OF_DDP = "torch.nn.parallel.distributed"
MOST_NAMES = 4
UNUSED = (
    "leave them out of the model, use them on all ranks, or pass find_unused_parameters=True to "
    "DistributedDataParallel"
)
CAUGHT = re.compile(r"Caught \S+ (in .*?)\.?$")
"""What torch raises of an exception in a worker of a DataLoader, or in a replica: with where."""

_launcher: LauncherLine | None = None
"""Of a rank's process: not of the processes that it forks."""


def ask(prompt: object = "", /) -> str:
    """In the place of `input`: what a person types at the launcher, who is asked by one rank at a
    time. Raises `EOFError` if there is nobody, and in a process that a rank has started."""
    if _launcher is None:
        raise EOFError("only a rank itself can ask")
    return _launcher.ask(str(prompt))


def forget_launcher() -> None:
    global _launcher
    _launcher = None


os.register_at_fork(after_in_child=forget_launcher)


class LauncherLine:
    """The rank's end of the line to its launcher."""

    def __init__(self, line: Connection, rank: int, size: int) -> None:
        self.line = line
        self.rank = rank
        self.size = size
        self.assignments: SimpleQueue[Assignment | None] = SimpleQueue()
        """The work of this rank; None when it may leave."""
        self.has_failed = False
        self.dismissed = threading.Event()
        """Set when the launcher has heard of the failure, and needs this process no longer."""
        self.box_is_opened = threading.Event()
        """Set when the launcher has opened the flight recorder, so that it may go with this
        process."""
        self.lock, self.asking = threading.Lock(), threading.Lock()
        self.answers: SimpleQueue[Answer] = SimpleQueue()
        self.main_thread = threading.get_ident()
        self.socket = os.fstat(line.fileno()).st_ino
        close_in_children(line)
        OurThread(target=self.follow_orders, name="launcher", daemon=True).start()

    def send(self, kind: MessageKind, *content: Any) -> None:
        # this process has been forked from the rank, and came back from what the rank runs
        if self.line.closed:
            os._exit(1)
        if not self.is_connected:  # the launcher hears how the process ends
            return
        try:
            with self.lock:
                self.line.send((kind.value, *content))  # a plain string, whoever reads it
        except ConnectionError:  # the launcher is gone, or has asked this process to end
            if threading.get_ident() == self.main_thread:
                finish()
            os._exit(1)

    @property
    def is_connected(self) -> bool:
        """Whether the program has left the line open. (It may close all descriptors, as daemons do,
        and open files that get their numbers.)"""
        try:
            return os.fstat(self.line.fileno()).st_ino == self.socket
        except OSError:
            return False

    def ask(self, prompt: str) -> str:
        """The line that a person types. Raises `EOFError` if there is none."""
        sys.stdout.flush()
        with self.asking:
            self.answers = SimpleQueue()  # an interrupted question may have been answered
            self.send(MessageKind.ASK, prompt)
            answer = self.answers.get()
        if answer.text is None:
            raise EOFError(answer.reason or "EOF when reading a line")
        return answer.text

    def follow_orders(self) -> None:
        """The body of a thread: do what the launcher orders, until it closes its end of the
        line."""
        while self.is_connected:
            try:
                order = self.line.recv()
            except (EOFError, OSError):
                if self.is_connected:
                    self.go_without_launcher()
                return
            self.follow(order)

    def go_without_launcher(self) -> None:
        """The launcher has closed its end: end at once, unless this process is ending already."""
        if not (self.has_failed or handles_sigterm()):
            os._exit(1)
        self.dismissed.set()
        self.box_is_opened.set()

    def follow(self, order: Assignment | Answer | Order) -> None:
        match order:
            case Order.WHERE:
                frame = sys._current_frames()[self.main_thread]
                place = describe_place(traceback.extract_stack(frame))
                self.send(MessageKind.STACK, FAILS if self.has_failed else place, look())
            case Order.OPENED:
                self.box_is_opened.set()
            case Order.END:
                request_preemption()
                if handles_sigterm():
                    os.kill(os.getpid(), signal.SIGTERM)
            case Order.ABORT:
                abort_operations()
            case Order.INTERRUPT:
                signal.pthread_kill(self.main_thread, signal.SIGINT)
            case Order.INTERRUPT_ALL:
                os.killpg(0, signal.SIGINT)
            case Order.LEAVE:
                self.dismissed.set()
                self.assignments.put(None)
            case Answer():
                self.answers.put(order)
            case Assignment():
                # here, in the order of the line: it may be asked before it begins
                clear_preemption()
                self.assignments.put(order)

    def submit(self, result: Any, changes: list[str]) -> None:
        """Hand in the result. Without `changes`, this process can run something else as a new one
        would."""
        try:
            pickled = pickle.dumps(result)
        except Exception as error:
            words = f"returned what cannot be sent to the launcher ({error}): return plain data"
            raise RankFailed(self.rank, self.size, words) from None
        if not self.is_connected:
            end_unheard(result)
        flush()
        self.send(MessageKind.RESULT, pickled, changes)

    def fail(self, error: BaseException) -> NoReturn:
        """Report a failure, and end as the process of a script does."""
        if not self.is_connected:
            end(error)
        self.has_failed = True
        flush()
        # Ctrl-C may come twice: from the terminal, and from the launcher, which passes it on
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signals.do_nothing)
        self.send(MessageKind.FAILED, failure(error, self.rank, self.size))
        finish()
        self.dismissed.wait()
        # The launcher sends them as it closes the line, and the end of the interpreter would
        # restore what they do to any process.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        forget_frames(error)
        exit_orderly(1)


def end_unheard(result: Any) -> NoReturn:
    """End this process, whose program has closed the line: the launcher hears its exit code
    only."""
    if result is None:
        end()
    print(
        "playground: what this rank returned is lost, as it has closed the descriptor that its "
        "launcher hears it by (os.closerange?): return None, or close the program's own files",
        file=sys.stderr,
    )
    finish()
    os._exit(1)


def handles_sigterm() -> bool:
    """Whether the program has a handler of its own for SIGTERM. The launcher sends it, as it closes
    the line, and SIGKILL after it."""
    handler = signal.getsignal(signal.SIGTERM)
    return callable(handler) and handler is not signals.do_nothing


def main(line: Connection, env: RankEnv, backend: str) -> None:
    """The life of a rank."""
    global _launcher
    _launcher = launcher = LauncherLine(line, env.rank, env.size)
    launcher.send(MessageKind.UP)
    report_to(partial(launcher.send, MessageKind.REPORT))
    try:
        live(launcher, env, backend)
    except BaseException as error:
        # whatever it is, SystemExit included: the launcher must receive it
        launcher.fail(error)


def live(launcher: LauncherLine, env: RankEnv, backend: str) -> None:
    """Enter the world, run what the launcher sends, leave the world: when all may, or when a
    program has ended."""
    from playground.world.rank import program_groups  # noqa: F401 - it replaces functions of torch's
    from playground.world.rank.process_state import ProcessState

    member = state = None
    while work := launcher.assignments.get():
        if not work.stays:
            work.move_in()
        if member is None or state is None:
            member = enter_world(launcher, env, backend, work)
            state = ProcessState()
        else:
            go_on(member, work)
        settle(member, state, work)
        fn, args = work.load()
        if not work.stays:
            leave_to_launcher(work.preemptible)
            if not work.bare:  # which is its program's, and is not kept
                state.begin()
        result = run_until_preempted(run_function, call, fn, env.rank, env.size, *args)
        conclude(launcher, member, state, work, result)
        if work.bare:
            return
    finish()  # while the process group stands: what is registered with atexit may destroy it
    if member:
        member.leave()
    # All results are in. torch's C++ may abort where it is taken down while threads of its own run.
    flush()
    os._exit(0)


def enter_world(launcher: LauncherLine, env: RankEnv, backend: str, work: Assignment) -> Member:
    """Be a member of the world, and send the launcher the box, if there is one."""
    from playground.world.rank.member import Member

    with signals_blocked():  # for the threads that torch starts
        member = Member(env, backend, None, timeout=work.timeout, meets=not work.bare)
    # now, while there is time to open it: gloo may abort this process in its first operation
    if member.box:
        launcher.send(MessageKind.BOX, member.box.file)
    return member


def go_on(member: Member, work: Assignment) -> None:
    """Go on from the work before: meet the others anew, stay in what it has left, or leave its
    process groups."""
    from playground.explain.hang.hooks import hooks

    if work.rendezvous:
        member.meet_again(work.rendezvous, work.timeout)
    elif work.stays:
        hooks.continue_program()
    else:
        member.drop_groups()


def settle(member: Member, state: ProcessState, work: Assignment) -> None:
    """What comes before the work's module is imported: form its process group, and let the process
    be as a new one, unless the work stays in what the one before has left."""
    from playground.world.rank.debugger import LONG, prepare_breakpoints

    if work.breakpoints and work.breakpoints.lifts_timeouts:
        member.offered["timeout"] = LONG
    if work.rendezvous or not work.stays:
        form_group(member, work)
    if not work.stays:
        prepare_breakpoints(member.env.rank, work.breakpoints, ask)
        state.renew()


def conclude(
    launcher: LauncherLine, member: Member, state: ProcessState, work: Assignment, result: Any
) -> None:
    """The work has returned: hand in its result, with what it has changed here. A bare one's
    process ends then, with its threads and exit functions before."""
    from playground.explain.hang.hooks import hooks

    is_over = not (work.stays or work.bare)
    if is_over:
        member.backend.synchronize()  # a GPU that stands still is explained while it is watched
    if work.bare:
        finish()
    hooks.end_program()
    launcher.submit(result, state.find_changes() if is_over else ["its program goes on"])
    if work.bare and member.box:
        launcher.box_is_opened.wait()


def form_group(member: Member, work: Assignment) -> None:
    """Form the process group of the work, or leave that to its program."""
    with signals_blocked():
        if work.bare:
            member.leave_group_to_program(work.timeout)
        else:
            member.form_group(work.timeout)
    keep_from_programs()


def abort_operations() -> None:
    """In this process, have every operation of a process group raise, and the forming of groups: no
    group is of use after that."""
    from playground.world.rank.member import members

    end_waits()
    for member in members:
        shut_down_groups(member.env.rendezvous.port)
        break_off_connecting(member.env.size)
        member.backend.abort_groups()


def failure(error: BaseException, rank: int, size: int) -> PlaygroundError:
    """`error` as the user is to read it: its headline, and its traceback from where their own
    function begins."""
    if isinstance(error, PlaygroundError):
        return error
    if isinstance(error, BdbQuit):
        advice = str(error)
        return UsageError(advice) if advice else RankFailed(rank, size, QUIT)
    whole = traceback.TracebackException.from_exception(error)
    innermost = whole.stack[-1:]
    whole.stack = traceback.StackSummary.from_list(user_frames(whole.stack) or whole.stack)
    headline = say_headline("".join(whole.format_exception_only()).strip().splitlines())
    if missing := backends.explain_missing_device(error) or backends.explain_shared_device(error):
        own = [frame for frame in whole.stack if is_program(frame.filename)]
        where = traceback.StackSummary.from_list(own[-1:] or whole.stack[-1:])
        return RankFailed(rank, size, f"failed: {missing}", "".join(where.format()).rstrip())
    # The backends raise RuntimeError. A socket or a file of the user's own raises OSError, and may
    # say the same.
    lost = isinstance(error, RuntimeError) and LOST_PEER.search(str(error))
    kind = PeerDisconnected if lost else RankFailed
    if unused := describe_unused(error):
        headline, cure = f"{headline.partition('. ')[0]}", f"{unused}: {UNUSED}"
    else:
        cure = describe_named_gpu(error, whole.stack) or backends.find_cure(error)
    words = ": ".join(filter(None, [f"failed: {headline}", cure]))
    failed = kind(rank, size, words, "".join(whole.format()).rstrip())
    for frame in innermost:
        failed.refusal = describe_refusal(error, frame)
    return failed


def describe_named_gpu(error: BaseException, stack: traceback.StackSummary) -> str:
    """What torch says of tensors on two GPUs, of which one is this rank's: where the program's
    files name the other one. Empty if `error` does not say it, or they do not."""
    own = f"cuda:{os.environ.get('LOCAL_RANK', '')}"
    others = {*re.findall(r"cuda:\d+", str(error))} - {own}
    if TWO_DEVICES not in str(error) or own not in str(error):
        return ""
    for file in dict.fromkeys(each.filename for each in stack if is_program(each.filename)):
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            for line, name in find_named_gpus(Path(file).read_bytes()):
                if name in others:
                    place = f"{os.path.basename(file)}:{line}"
                    return f"this rank owns {own}; the text names {name} at {place}"
    return ""


def describe_unused(error: BaseException) -> str:
    """What DistributedDataParallel says of parameters without a gradient, by their names; empty if
    `error` does not say it, or the names are not known."""
    told = NO_GRADIENT.search(str(error))
    names = told and find_names(error, [*map(int, told[2].split())])
    if not told or not names:
        return ""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"on rank {told[1]}, the loss does not depend on {', '.join(names[:MOST_NAMES])}{more}"


def find_names(error: BaseException, numbers: Sequence[int]) -> list[str]:
    """The names of parameters by their numbers in the wrapped model whose forward has raised this;
    none if they are not known. Source: DistributedDataParallel._module_parameters (torch 2.15)"""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        model: Any = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == OF_DDP and hasattr(model, "_module_parameters"):
            names = {id(each): name for name, each in model.module.named_parameters()}
            parameters = model._module_parameters
            return [names[id(parameters[one])] for one in numbers if one < len(parameters)]
    return []


def say_headline(said: Sequence[str]) -> str:
    """The headline of an exception, of the lines of what it is and says. One that hands on what
    another process has raised, as a worker of a DataLoader, is told by that, with its line."""
    if not any(NESTED in line for line in said):
        return said[0]
    caught = CAUGHT.search(said[0])
    where = ", ".join(filter(None, (find_place(said), caught and caught[1])))
    return f"{say_innermost(said)} ({where})" if where else say_innermost(said)


def describe_refusal(error: BaseException, innermost: traceback.FrameSummary) -> str:
    """In one line, what a program says by an `assert` with a message, and where; or by
    `sys.exit`. Empty for any other error, and for an `assert` of a library's."""
    message = error.args[0] if error.args else None
    if not (isinstance(message, str) and message.strip()):
        return ""
    words = " ".join(message.split())
    if isinstance(error, SystemExit):
        return words
    if isinstance(error, AssertionError) and is_program(innermost.filename):
        return f"{words} ({os.path.basename(innermost.filename)}:{innermost.lineno})"
    return ""


def user_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """`stack` from where the user's function begins, without our own part in it; nothing if it is
    not in that function."""
    ours = (*RUNNERS, "<frozen importlib", "<frozen runpy")
    start = next((i for i, frame in enumerate(stack) if frame.filename == __file__), 0)
    return [frame for frame in stack[start:] if not frame.filename.startswith(ours)]


def describe_place(stack: traceback.StackSummary) -> str:
    """The user's frames; in a line, where a rank is that has not begun their function, or has left
    it."""
    if theirs := user_frames(stack):
        return "".join(traceback.format_list(theirs))
    last = stack[-1]
    place = f"{os.path.basename(last.filename)}:{last.lineno}"
    return f"  (not in the program: in {last.name}, {place})"
