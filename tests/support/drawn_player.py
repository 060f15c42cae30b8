"""Runs random programs on real ranks."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from random_programs import Program, Step, list_groups, receive, send, write_programs

from playground.explain.hang import NEW_GROUP
from playground.explain.hang.states import SEND
from playground.world.rank.reports import report

TAGS, IN_THREAD = 20, 19
"""Tags per program; the one of messages that a thread sends."""
LONG = 0.3
"""Seconds that a rank sleeps or is stopped at most: some looks of the launcher's."""


def stop_for_a_while(rng: random.Random) -> subprocess.Popen[bytes]:
    """Have this process stopped, and continued, by another one."""
    words = f"sleep {rng.uniform(0, 1)}; kill -STOP {{0}}; sleep {LONG}; kill -CONT {{0}}"
    return subprocess.Popen(["sh", "-c", words.format(os.getpid())])


class Player:
    """Runs programs on this rank of a world."""

    def __init__(self, size: int, rng: random.Random, disturbed: bool) -> None:
        self.groups = {ranks: dist.new_group(list(ranks)) for ranks in list_groups(size)[1:]}
        self.rng = rng
        self.disturbed = disturbed
        self.called = 0

    def run(self, number: int, program: Program) -> None:
        works, threads = dict[str, Any](), list[threading.Thread]()
        for step in program:
            if self.disturbed and self.rng.random() < 0.05:
                time.sleep(self.rng.choice((0.001, 0.01, 0.01, 0.1, LONG)))
            elif not self.disturbed:
                report(number=number)
            if step.call and step.call.tag == IN_THREAD and step.call.kind == SEND:
                threads.append(threading.Timer(self.rng.uniform(0, 0.1), self.call, (step, number)))
                threads[-1].start()
            elif step.call:
                works[step.call.line] = self.call(step, number)
            if isinstance(work := works.get(step.awaits), dist.Work):
                work.wait()
        for thread in threads:
            thread.join()

    def call(self, step: Step, number: int) -> Any:
        """Call its operation; return the work if it is asynchronous."""
        assert step.call
        self.called += 1
        call, returns = step.call, step.awaits != step.call.line
        group, tag = self.groups.get(call.group), call.tag + TAGS * number
        count, dtype = call.shape[0] if call.shape else 1, getattr(torch, call.dtype or "float32")
        scale = 20_000 if number % 4 == 3 else 1  # some do not fit into the buffers of sockets
        tensor, *parts = torch.zeros(1 + len(call.group), count * scale, dtype=dtype)
        root_parts = parts if call.peer == dist.get_rank() else None
        more: dict[str, Any] = {"group": group, "async_op": returns}
        match call.name:
            case "send":
                return (dist.isend if returns else dist.send)(tensor, call.peer, group, tag)
            case "recv":
                return (dist.irecv if returns else dist.recv)(tensor, call.peer, group, tag)
            case "all_reduce":
                return dist.all_reduce(tensor, **more)
            case "broadcast":
                return dist.broadcast(tensor, call.peer, **more)
            case "reduce":
                return dist.reduce(tensor, call.peer, **more)
            case "all_gather_into_tensor":
                return dist.all_gather_into_tensor(torch.cat(parts), tensor, **more)
            case "scatter":
                return dist.scatter(tensor, root_parts, call.peer, **more)
            case "gather":
                return dist.gather(tensor, root_parts, call.peer, **more)
            case "all_to_all":
                return dist.all_to_all([torch.zeros_like(part) for part in parts], parts, **more)
            case "barrier":
                return dist.barrier(**more)
        assert call.name == NEW_GROUP
        return dist.new_group() and None


def write_rounds(size: int, count: int, rng: random.Random) -> list[list[Program]]:
    """Right programs, in each of which a thread sends a message that the main thread of another
    rank waits for."""
    rounds = [write_programs(size, rng) for _ in range(count)]
    for programs in rounds:
        sender, receiver = rng.sample(range(size), 2)
        for rank, place, operation in (
            (sender, 0, send(receiver, size)),
            (receiver, rng.randint(0, len(programs[receiver])), receive(sender, size)),
        ):
            operation = replace(operation, tag=IN_THREAD, line="in a thread")
            programs[rank].insert(place, Step(operation, operation.line))
    return rounds
