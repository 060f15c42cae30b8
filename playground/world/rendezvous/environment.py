"""The world this process was started into, by torchrun, Slurm or a person: what the environment
says of it, and what torchrun is told."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from playground.base.errors import PeerDisconnected, PlaygroundError, UsageError
from playground.base.signals import end_with_parent
from playground.base.untrusted import read_integer
from playground.world.rendezvous.rendezvous import Rendezvous, Server, is_loopback

SERVED_BY_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"
"""The variable by which torchrun says that the store at MASTER_ADDR:MASTER_PORT is there
already."""

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""The variable by which torchrun, and our launcher too, say how often a rank's world has been
restarted.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
RUN_ID = "TORCHELASTIC_RUN_ID"

MAX_WORLD_SIZE = 2**17
"""More ranks than any world has had: a larger number is a slip, and would be waited for."""


@dataclass(frozen=True, kw_only=True)
class RankEnv:
    """A process's place in a world."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    rendezvous: Rendezvous


def rank_env_from(environ: Mapping[str, str] = os.environ) -> RankEnv | None:
    """The world this process was started into, or None if it is to start its own.

    Reads what torchrun, `take_slurm_place` and people set: RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Raises `UsageError` if they contradict
    each other.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    needed = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in needed if name not in environ]
    if missing:
        given = ", ".join(name for name in needed if name in environ)
        raise UsageError(
            f"{given} set without {', '.join(missing)}: set all of {', '.join(needed)}, or none to "
            "start a world here"
        )
    size = read_integer("WORLD_SIZE", environ, 1, MAX_WORLD_SIZE + 1)
    rank = read_integer("RANK", environ, 0, size)
    host, port = environ["MASTER_ADDR"], read_integer("MASTER_PORT", environ, 1, 65536)
    is_served = environ.get(SERVED_BY_TORCHRUN) == "True"
    server = Server.TORCHRUN if is_served else Server.RANK_0
    rendezvous = Rendezvous(host=host, port=port, local=is_loopback(host), server=server)
    # Unless the environment says how many ranks share this host: all if they meet on loopback, else
    # only this one.
    local_size = size if rendezvous.local else 1
    if "LOCAL_WORLD_SIZE" in environ:
        local_size = read_integer("LOCAL_WORLD_SIZE", environ, 1, size + 1)
    local_rank = rank % local_size
    if "LOCAL_RANK" in environ:
        local_rank = read_integer(
            "LOCAL_RANK", environ, 0, local_size if "LOCAL_WORLD_SIZE" in environ else size
        )
    return RankEnv(
        rank=rank, size=size, local_rank=local_rank, local_size=local_size, rendezvous=rendezvous
    )


def take_slurm_place(environ: MutableMapping[str, str] = os.environ) -> None:
    """In one of several tasks that srun has started, set what torchrun would, from what Slurm says
    of the task; `MASTER_ADDR` and `MASTER_PORT` only if they are not set. The port follows from the
    numbers of job and step, which all tasks know.

    Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    if {"RANK", "WORLD_SIZE"} & environ.keys() or environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return
    # "2(x3),1": two tasks on each of three hosts, and one on the last
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ["SLURM_STEP_TASKS_PER_NODE"])
    tasks = [count for count, times in runs for _ in range(int(times or 1))]
    # "gpu[01-03,07],login"
    first_host = re.sub(r"\[(\d+)[^]]*\]", r"\1", environ["SLURM_STEP_NODELIST"]).partition(",")[0]
    number = int(environ["SLURM_JOB_ID"]) + 997 * int(environ["SLURM_STEP_ID"])
    environ.update(
        RANK=environ["SLURM_PROCID"],
        WORLD_SIZE=environ["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=environ["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=tasks[int(environ["SLURM_NODEID"])],
    )
    environ.setdefault("MASTER_ADDR", first_host if len(tasks) > 1 else "127.0.0.1")
    environ.setdefault("MASTER_PORT", str(20_000 + number % 10_000))


def restart_count(environ: Mapping[str, str] = os.environ) -> int:
    """How often this rank's world has failed and been restarted: 0, then 1, …

    `launch(…, restarts=K)` counts for all ranks alike, torchrun on each host by itself
    (pytorch/pytorch#108158).
    """
    return read_integer(RESTART_COUNT, environ, 0, sys.maxsize) if RESTART_COUNT in environ else 0


def end_with_torchrun() -> None:
    """From now on, if torchrun has started this process, the kernel kills it when that one ends.
    torchrun ends its ranks first, unless it is killed."""
    if RUN_ID in os.environ:
        end_with_parent()


def name_of_torchrun() -> str:
    """A name for the torchrun that has started this process, the same in all ranks that it has
    started, and no other's; empty if this process is not its child. Source: proc(5)"""
    parent = os.getppid()
    if RUN_ID not in os.environ:
        return ""
    try:
        with open(f"/proc/{parent}/stat", encoding="utf-8", errors="replace") as file:
            begun = file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{parent}-{begun}"


def write_error_file(error: PlaygroundError) -> None:
    """Tell torchrun, if it has started this process, what it failed of.

    torchrun calls the failure with the earliest time, in whole seconds, the root cause; a rank
    without this file failed when torchrun saw that it had ended. One that failed because of another
    is dated a second later: never before its culprit. Source:
    torch/distributed/elastic/multiprocessing/errors/__init__.py
    """
    if not (path := os.environ.get(ERROR_FILE)):
        return
    timestamp = int(time.time()) + isinstance(error, PeerDisconnected)
    details = {"py_callstack": str(error), "timestamp": str(timestamp)}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": error.headline, "extraInfo": details}}, file)
