"""The end of a world: its ranks leave, all at once, or are stopped."""

from __future__ import annotations

import time
from typing import Any

from playground.runtime.errors import RankFailed
from playground.runtime.launcher.rank_handle import GRACE, RankHandle, describe_exit
from playground.runtime.launcher.server import LOST_BY_THE_SERVER
from playground.runtime.launcher.watch import ask_for_stacks, wait_relaying

LEAVE_LIMIT = 30.0
"""Seconds a rank has to destroy its process group and give its memory back, all results being in."""
LOOK_INTERVAL = 1.0
"""Seconds between two looks for ranks whose end is not told, because the fork server is stopped."""


def release(ranks: list[RankHandle]) -> None:
    """Let the ranks go, all at once. Raise `RankFailed` for one that cannot leave cleanly."""
    for rank in ranks:
        rank.order("leave")
    staying: dict[Any, RankHandle] = {rank.process.sentinel: rank for rank in ranks}
    lines: dict[Any, RankHandle] = {rank.line: rank for rank in ranks}
    end = time.monotonic() + LEAVE_LIMIT
    while staying:
        left = end - time.monotonic()
        ready = wait_relaying(ranks, [*staying, *lines], max(0.0, min(left, LOOK_INTERVAL)))
        if not ready and left <= 0:
            # rank 0 waits for the others: if one of them is still there, it is that one
            last = max(staying.values(), key=lambda rank: rank.number)
            failure = unclean_exit(last, f"still there after {LEAVE_LIMIT:g} s")
            failure.others = ask_for_stacks([last])
            raise failure
        for line in lines.keys() & set(ready):
            try:
                lines[line].receive()
            except (EOFError, OSError):  # it is about to end
                del lines[line]
            else:
                if reason := lines[line].failure:
                    raise reason
        for sentinel in staying.keys() & set(ready) if ready else [*staying]:
            code = staying[sentinel].process.exitcode
            if code in (0, LOST_BY_THE_SERVER):  # its result is in, and it is gone
                del staying[sentinel]
            elif code is not None:
                raise unclean_exit(staying[sentinel], describe_exit(code, staying[sentinel].backend))


def unclean_exit(rank: RankHandle, how: str) -> RankFailed:
    return RankFailed(rank.number, rank.size, f"returned its result but did not leave cleanly: {how}")


def stop(ranks: list[RankHandle]) -> None:
    """End what is left of the ranks: the closed line tells them, then SIGTERM, then SIGKILL."""
    try:
        for rank in ranks:
            rank.relay_output()
    finally:  # whoever was to read that may be gone
        try:
            for rank in ranks:
                rank.line.close()
                (rank.process.terminate if rank.up else rank.process.kill)()  # the start of one is not to be waited for
            end = time.monotonic() + GRACE
            for rank in ranks:
                rank.process.join(max(0.0, end - time.monotonic()))
        finally:  # Ctrl-C may come once more
            kill(ranks)


def kill(ranks: list[RankHandle]) -> None:
    """End them at once, and let go of all that belongs to them."""
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.line.close()
        for output in rank.outputs:
            output.close()
