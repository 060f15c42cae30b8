"""Random injections: a process of a command gets a signal at a random moment, and the run must
still end well.

The exit code must be right for what was done; what failed is said in one line that names the right
rank, without a traceback; soon no process is left, nor a file in TMPDIR. What is not so is a mark:
what is seen; what should be.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGABRT, SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGSTOP, SIGTERM, Signals

from processes import ENOUGH, catches_signals, free_port

COMMANDS = {
    "hello": "hello -n 2",
    "p2p": "p2p",
    "torchrun hello": "torchrun hello",
    "collectives": "collectives -n 3",
    "allreduce": "allreduce -n 3",
    "sgd": "sgd --epochs 1",
    "ladder": "ladder --steps 4",
    "ddp": "ddp --epochs 1",
    "prove": "prove -n 2 --samples 1536",
    "bert": "bert --steps 2 --batch 8",
    "elastic": "elastic -n 2",
    "rpc": "rpc",
    "parameter-server": "parameter-server --steps 4",
    "pipeline": "pipeline",
    "zero": "zero -n 2 --steps 2",
    "tensor": "tensor -n 2 --steps 2",
    "context": "context",
    "experts": "experts -n 2 --steps 2",
    "mesh": "mesh -n 4 --steps 1",
    "bench": "bench -b 64 -e 4096",
    "scale": "scale -n 4",
}
"""By name; those that train find digits in the cache, where the first run draws them."""
FATAL = (SIGKILL, SIGABRT, SIGSEGV)
LAUNCHER = "launcher"
SERVER = "fork server"
RANK = "rank"
GROUP = "group"
SIGNALS = (*FATAL, SIGTERM, SIGINT, SIGHUP, SIGSTOP)
TIMEOUT = 60
"""Seconds after which silent ranks are given up: one of them may be stopped."""
NOTICE = re.compile(r"playground: (for \d+ s, |no rank has made progress)")
"""Of a run that stands still, and goes on."""
UNEXPLAINED = re.compile(r"Traceback|terminate called|Exception ignored")


@dataclass(frozen=True)
class Injection:
    command: str
    target: str
    number: Signals
    place: float
    """When, as a part of the time that the command takes undisturbed."""
    resumed: bool
    """Whether what is stopped is continued a second later; otherwise a launcher is killed then."""
    newborn: bool = False
    """Whether it comes as soon as there is a first rank, the others not being forked yet, and not
    at that time."""

    def __str__(self) -> str:
        signals = f"{self.number.name}{' and SIGCONT' * self.resumed}"
        return (
            f"{self.command}: {signals} to the {self.target} at "
            f"{'birth' if self.newborn else f'{self.place:.0%}'}"
        )


def draw(count: int, seed: int, commands: Sequence[str]) -> Iterator[Injection]:
    generator = random.Random(seed)
    for _ in range(count):
        command = generator.choice(commands)
        target = generator.choice([LAUNCHER, SERVER, RANK, GROUP])
        number = generator.choice(SIGNALS)
        resumed, newborn = number == SIGSTOP and generator.random() < 0.5, generator.random() < 0.25
        yield Injection(command, target, number, generator.random(), resumed, newborn)


def read(pid: object, file: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_bytes()
    return b""


def children(pid: int) -> list[int]:
    return [*map(int, read(pid, f"task/{pid}/children").split())]


class Run:
    """A command in a folder of its own, and what becomes of it."""

    def __init__(self, command: str, folder: Path) -> None:
        self.folder = folder
        (folder / "temporary").mkdir(parents=True)
        words = [*COMMANDS[command].split(), "--timeout", str(TIMEOUT)]
        self.torchrun = words[0] == "torchrun"
        if self.torchrun:
            words[0] = (
                f"torch.distributed.run --nproc-per-node 2 --master-port {free_port()} -m "
                "playground"
            )
        else:
            words.insert(0, "playground")
        environ = {**os.environ, "TMPDIR": str(folder / "temporary"), "INJECTED": str(folder)}
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *" ".join(words).split()],
                stdout=out, stderr=err, start_new_session=True, env=environ,
            )  # fmt: skip
        self.rank = 0
        self.is_last = False
        """Whether it is the last child of the fork server: that serves the store."""
        self.begun = True
        self.sent = 0.0

    def find(self, target: str) -> list[int]:
        """The processes that are meant; ranks in their order."""
        forks = [pid for pid in self.members() if b"fork_server" in read(pid, "cmdline")]
        ranks = {rank for pid in forks for rank in children(pid)}
        servers = [pid for pid in forks if pid not in ranks]
        if target == RANK:
            return [
                rank
                for pid in ([self.process.pid] if self.torchrun else servers)
                for rank in children(pid)
            ]
        return servers if target == SERVER and not self.torchrun else [self.process.pid]

    def inject(self, injection: Injection, seconds: float) -> bool:
        """Send the signal when its time and its target have come; False if the run is over
        before."""
        if not injection.newborn:
            time.sleep(injection.place * seconds)
        while self.process.poll() is None:
            if injection.newborn and not self.find(RANK):
                continue
            if pids := self.find(injection.target):
                self.rank = int(injection.place * 1e6) % len(pids)
                self.is_last = self.rank == len(pids) - 1
                self.begun, self.sent = catches_signals(self.process.pid), time.monotonic()
                send = os.killpg if injection.target == GROUP else os.kill
                with contextlib.suppress(ProcessLookupError):
                    send(pids[self.rank], injection.number)
                    time.sleep(injection.number == SIGSTOP)
                    if injection.resumed:
                        send(pids[self.rank], SIGCONT)
                    elif injection.number == SIGSTOP and injection.target in (LAUNCHER, GROUP):
                        self.process.kill()
                    return True
            time.sleep(0.005)
        return False

    def marks(self, injection: Injection | None, left: float) -> Iterator[str]:
        """What its end has left. `left`: seconds that a process may outlive the command."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2 * ENOUGH + TIMEOUT)
        ended = time.monotonic()
        # for a store that went with it, which torch tries to reach twice
        left += 2 * TIMEOUT * self.torchrun
        while (members := self.members()) and time.monotonic() < ended + left:
            time.sleep(0.02)
        for pid in members:
            yield f"process {pid} ({read(pid, 'comm').decode().strip()}) is left; none"
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)
        killed = (
            injection
            and injection.target in (LAUNCHER, GROUP)
            and injection.number in (*FATAL, SIGSTOP)
        )
        others = (
            "torchelastic_",
            "torchinductor_",
            *["playground-"] * bool(killed),
        )
        if files := [
            name for name in os.listdir(self.folder / "temporary") if not name.startswith(others)
        ]:
            yield f"TMPDIR has {', '.join(files)}; nothing"
        code, err = self.process.poll(), (self.folder / "err").read_text(errors="replace")
        said = [
            line
            for line in err.splitlines()
            if line.startswith("playground: ") and not NOTICE.match(line)
        ]
        if code not in (right := self.right_codes(injection, ended - self.sent)):
            yield f"exit code {code} {said}; {right}"
        if len(said) > 1 or (code == 1 and self.begun and not (said or self.torchrun)):
            yield f"{said}; one line"
        # it says where it was
        interrupted = injection and injection.target == RANK and injection.number == SIGINT
        if (
            (found := UNEXPLAINED.search(err))
            and self.begun
            and not self.torchrun
            and not interrupted
        ):
            yield f"{err[found.start() :][-1000:]!r}; one line"
        if injection and injection.target == RANK and code == 1 and said and not self.torchrun:
            why = {SIGSTOP: "no sign of life", SIGINT: "KeyboardInterrupt|exited with code 1"}.get(
                injection.number
            )
            why = why or injection.number.name
            # The first child of a fork server may be a program that the import of torch runs.
            of_import = injection.newborn and "waits for a process that is stopped" in said[-1]
            whom = rf"\b{self.rank} of " + "|the ranks' store" * self.is_last
            if not of_import and not (re.search(whom, said[-1]) and re.search(why, said[-1])):
                yield f"{said[-1]}; rank {self.rank}, {why}"

    def members(self) -> list[int]:
        mark = f"INJECTED={self.folder}\0".encode()
        return [
            int(pid)
            for pid in os.listdir("/proc")
            if pid.isdigit() and mark in read(pid, "environ")
        ]

    def right_codes(self, injection: Injection | None, seconds: float) -> set[int]:
        """The exit codes that are right, for a run that has ended so many seconds after the
        signal."""
        if injection is None:
            return {0}
        number, target = injection.number, injection.target
        if self.torchrun:
            return {0, 1, -number, -SIGKILL}
        if target in (SERVER, RANK):  # 0: it was restarted, or had done its part
            harmless = injection.resumed or (
                target == SERVER and number in (SIGINT, SIGHUP, SIGTERM)
            )
            return {0} if harmless else {0, 1}
        if number in FATAL or number == SIGSTOP:
            return {0} if injection.resumed else {-SIGKILL if number == SIGSTOP else -number}
        codes = {128 + number} | ({0} if seconds < 1 else set())
        preempted = {os.EX_TEMPFAIL} if number == SIGTERM else set()
        # before that, it is Python's doing
        return codes | preempted | (set() if self.begun else {1, -number})


def campaign(
    injections: Iterator[Injection], folder: Path, left: float
) -> Iterator[tuple[Injection | str, list[str]]]:
    """Each injection that has taken effect, and its marks; before a command's first one, those
    without."""
    seconds: dict[str, float] = {}
    for number, injection in enumerate(injections):
        command = injection.command
        if command not in seconds:
            run, begun = Run(command, folder / f"{number}-undisturbed"), time.monotonic()
            yield f"{command}, undisturbed", [*run.marks(None, left)]
            seconds[command] = time.monotonic() - begun
        run = Run(command, folder / str(number))
        if run.inject(injection, seconds[command]):
            yield injection, [*run.marks(injection, left)]
        shutil.rmtree(run.folder, ignore_errors=True)
