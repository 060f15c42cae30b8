"""MPI beside the backend and ours: as many processes of an MPI world, which make the same calls on the same data.

mpirun starts them, so they are none of our ranks: rank 0 tells them over a socket what to do. While others are
measured, they wait there, which takes nothing from the cores; waiting inside MPI would.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from playground.measurement.interleave import Heartbeat
from playground.runtime import UsageError, host
from playground.runtime.meeting.agreement import refuse_together
from playground.runtime.meeting.process_end import end_with_parent
from playground.runtime.temporary_folder import temporary_folder
from playground.tools.bench.settings import MPI_TYPES

DEADLINE = 60
"""Seconds in which MPI must have started, and in which a trial must have ended."""
END_LIMIT = 5.0
"""Seconds in which mpirun must have ended."""
ALLOWED = {
    **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    **{"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"},
    **dict.fromkeys(("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy"), "none"),
}
"""Environment in which Open MPI, 4 or 5, allows what MPICH does: root, more processes than cores, and every core."""


class Mpirun:
    """mpirun and the processes that it starts, as rank 0 sees them. What fails raises `UsageError`."""

    def __init__(self, program: str, size: int, address: Path, output: Path) -> None:
        self.size, self.output = size, output
        """`output`: the file for what they print."""
        self.peers: dict[int, Connection] = {}
        """Connections to the processes, by their rank in the MPI world."""
        end_with_us = partial(end_with_parent, os.getpid(), signal.SIGTERM, ctypes.CDLL(None))
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [program, "-n", str(size), sys.executable, "-m", __name__, str(address), str(size)],
                env=os.environ | ALLOWED,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=end_with_us if sys.platform == "linux" else None,
            )

    def connect(self, listener: socket.socket) -> None:
        """Wait until all processes have started."""
        heartbeat, until = Heartbeat(), time.monotonic() + DEADLINE
        while len(self.peers) < self.size:
            heartbeat.beat()
            if self.process.poll() is not None:
                raise self.refusal()
            if time.monotonic() > until:
                raise refusal(f"no start within {DEADLINE} s")
            with contextlib.suppress(TimeoutError):
                peer = Connection(listener.accept()[0].detach())
                self.peers[self.receive(peer)] = peer

    def ask(self, method: str, args: tuple[object, ...]) -> list[Any]:
        """What this method of `MpiProcess` returns in each process."""
        for peer in self.peers.values():
            with contextlib.suppress(OSError):  # it has ended, as `receive` will say
                peer.send((method, args))
        return [self.receive(self.peers[rank]) for rank in range(self.size)]

    def receive(self, peer: Connection) -> Any:
        """The answer of a process."""
        heartbeat, until = Heartbeat(), time.monotonic() + DEADLINE
        try:
            while not peer.poll(1.0):
                heartbeat.beat()
                if time.monotonic() > until:
                    raise refusal(f"no answer within {DEADLINE} s")
            return peer.recv()
        except (EOFError, OSError):
            self.end()
            raise self.refusal() from None

    def refusal(self) -> UsageError:
        """After the end of mpirun: the error among what was printed, if there is one, or else the first words."""
        lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [line.strip().rstrip(":.") for line in lines if re.search("[a-z]", line)]
        errors = [line for line in lines if re.match(r"\w+Error\b", line)]
        return refusal(next(iter([*errors, *lines]), "mpirun ended and said nothing"))

    def end(self) -> None:
        """Hang up, which ends the processes and with them mpirun; if it does not, end that."""
        for peer in self.peers.values():
            peer.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                self.process.wait(END_LIMIT)
                return
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, number)
        self.process.wait()


def refusal(why: str) -> UsageError:
    return UsageError(f"MPI is not measured ({why}): --algorithm backend,auto leaves it out")


@contextlib.contextmanager
def start(program: str, size: int) -> Iterator[Mpirun]:
    """Start the processes, and connect to them."""
    with temporary_folder("mpi") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "rank 0"))
        listener.listen(size)
        listener.settimeout(0.1)
        mpirun = Mpirun(program, size, folder / "rank 0", folder / "output")
        try:
            mpirun.connect(listener)
            yield mpirun
        finally:
            mpirun.end()


class MpiWorld:
    """The processes of an MPI world, one per rank. All ranks must do the same with it; what fails raises `UsageError`
    on all of them."""

    def __init__(self, rank: int, size: int, mpirun: Mpirun | None) -> None:
        self.rank, self.size, self.mpirun = rank, size, mpirun
        """`mpirun`: on rank 0."""
        self.name: str = self.ask("name")
        """The implementation of MPI, with its version."""

    def ask(self, method: str, *args: object) -> Any:
        """What this method of `MpiProcess` returns in the process with this rank's number."""
        answers: list[Any] = [None] * self.size
        with refuse_together():
            if self.mpirun:
                answers = self.mpirun.ask(method, args)
        dist.broadcast_object_list(answers)
        return answers[self.rank]


@contextlib.contextmanager
def open_mpi(program: str, rank: int, size: int) -> Iterator[MpiWorld]:
    """The MPI world of `size` processes that this mpirun starts. Every rank must call this."""
    with contextlib.ExitStack() as stack:
        with refuse_together():
            try:
                mpirun = stack.enter_context(start(program, size)) if rank == 0 else None
            except OSError as error:
                raise refusal(str(error)) from None
        yield MpiWorld(rank, size, mpirun)


class MpiCall:
    """A collective in the MPI world: `make(rank)` returns its workload in each of the processes."""

    def __init__(self, world: MpiWorld, make: Callable[[int], object]) -> None:
        self.world = world
        self.wrong: int = world.ask("prepare", make)
        """Elements of this process's result that are wrong."""

    def __call__(self) -> None:
        self.timed(1)()

    def timed(self, times: int) -> Callable[[], float]:
        """As `interleave.timed`."""
        return partial(self.world.ask, "seconds", times)


class MpiProcess:
    """A process of the MPI world: does what rank 0 asks for."""

    def __init__(self, size: int) -> None:
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        if self.world.size != size:
            sys.exit("mpirun and mpi4py are of different MPI implementations")
        torch.set_num_threads(host.threads_per_rank(size))
        host.use_batch_scheduling()
        host.keep_freed_memory()
        self.work: Any = None
        """The workload, whose tensors must stay: `call` knows no more than where they lie."""
        self.call: Callable[[], object] = self.world.Barrier

    def name(self) -> str:
        """The implementation, with its version."""
        vendor, version = self.mpi.get_vendor()
        return " ".join([vendor, ".".join(map(str, version))])

    def prepare(self, make: Callable[[int], Any]) -> int:
        """Prepare a workload, in place of the one before. Returns how many elements of its result are wrong."""
        self.work = None
        self.work = work = make(self.world.rank)
        self.call = self.bind(work)
        wrong: int = work.count_wrong(self.call)
        work.clear()
        return wrong

    def seconds(self, times: int) -> float:
        """Seconds of one of `times` calls in a row, all processes starting together."""
        self.world.Barrier()
        started = time.perf_counter()
        for _ in range(times):
            self.call()
        return (time.perf_counter() - started) / times

    def bind(self, work: Any) -> Callable[[], object]:
        """MPI's call of a workload's collective, on its tensors."""
        world, is_root = self.world, self.world.rank == 0
        kind, op = getattr(self.mpi, MPI_TYPES[work.settings.dtype]), getattr(self.mpi, work.settings.op.upper())
        given, taken = (
            [self.mpi.memory.fromaddress(each.data_ptr(), each.nbytes), kind] for each in (work.input, work.output)
        )
        in_place = self.mpi.IN_PLACE
        calls = {
            "all_reduce": partial(world.Allreduce, in_place, given, op),
            "broadcast": partial(world.Bcast, given),
            "reduce": partial(world.Reduce, *((in_place, given) if is_root else (given, None)), op),
            "all_gather": partial(world.Allgather, given, taken),
            "reduce_scatter": partial(world.Reduce_scatter_block, given, taken, op),
            "all_to_all": partial(world.Alltoall, given, taken),
            "gather": partial(world.Gather, given, taken if is_root else None),
            "scatter": partial(world.Scatter, given if is_root else None, taken),
        }
        return calls[work.spec.name]


def serve(address: str, size: int) -> None:
    """Be a process of the MPI world until rank 0 hangs up. Whatever hangs ends at the deadline."""
    signal.alarm(DEADLINE)
    process = MpiProcess(size)
    with Client(address, "AF_UNIX") as rank_0, contextlib.suppress(EOFError):
        answer: object = process.world.rank
        while True:
            rank_0.send(answer)
            signal.alarm(0)
            method, args = rank_0.recv()
            signal.alarm(DEADLINE)
            answer = getattr(process, method)(*args)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
