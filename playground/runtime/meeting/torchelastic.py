"""Tell torchrun of a rank's failure, in a file that it reads then; notice in a rank that torchrun has ended.

torchrun calls the failure with the earliest time, in whole seconds, the root cause. A rank that has left no file failed
when torchrun saw that it had ended. Source: torch/distributed/elastic/multiprocessing/errors/__init__.py
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import threading
import time
from pathlib import Path
from typing import NoReturn

from playground.runtime.errors import PeerDisconnected, PlaygroundError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
RUN_ID = "TORCHELASTIC_RUN_ID"


def end_with_torchrun() -> None:
    """From now on, if torchrun has started this process, it ends as soon as that one does (Linux). torchrun ends its
    ranks first, unless it is killed."""
    if RUN_ID in os.environ:
        with contextlib.suppress(OSError):  # a container may refuse it
            pidfd = os.pidfd_open(os.getppid())
            if os.getppid() == 1 and not re.search(rb"python|torchrun", Path("/proc/1/cmdline").read_bytes()):
                exit_without_torchrun(None)  # the parent is the first process of the system or of the container
            threading.Thread(target=exit_without_torchrun, args=(pidfd,), name="wait for torchrun", daemon=True).start()


def exit_without_torchrun(pidfd: int | None) -> NoReturn:
    """Wait for torchrun to end, if it has not, and exit."""
    if pidfd is not None:
        select.select([pidfd], [], [])
    if os.environ.get("LOCAL_RANK") == "0":
        os.write(2, b"playground: torchrun has ended, and its ranks with it\n")
    os._exit(1)


def write_error_file(error: PlaygroundError) -> None:
    """Tell torchrun, if it has started this process, what it failed of.

    A rank that failed because of another one is dated a second later: never before its culprit.
    """
    if not (path := os.environ.get(ERROR_FILE)):
        return
    timestamp = int(time.time()) + isinstance(error, PeerDisconnected)
    details = {"py_callstack": str(error), "timestamp": str(timestamp)}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": error.headline, "extraInfo": details}}, file)
