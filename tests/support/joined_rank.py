"""A rank of a world in which one goes wrong, started by hand or by torchrun: `python -m joined_rank HOW CULPRIT`."""

from __future__ import annotations

import sys
from typing import NoReturn

import torch.distributed as dist
from ranks import misbehave

from playground.app import leave
from playground.runtime import signals
from playground.runtime.errors import PlaygroundError
from playground.runtime.launcher.entry import CommandWorld


def go_wrong(rank: int, size: int, how: str, culprit: int) -> None:
    """Every rank waits for the others; the culprit says a word and does something else."""
    dist.barrier()
    if rank == culprit:
        print("now", flush=True)
        misbehave(how)
    dist.barrier()


def main() -> NoReturn:
    how, culprit = sys.argv[1:]
    signals.exit_after(1.0)
    signals.handle_termination()
    try:
        CommandWorld(None).run(go_wrong, how, int(culprit))
    except PlaygroundError as error:
        leave(error.exit_code, str(error))
    leave(0)


if __name__ == "__main__":
    main()
