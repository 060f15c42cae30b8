"""What torchrun learns of a rank's failure: a file that it reads when the rank has ended.

torchrun calls the failure with the earliest time, in whole seconds, the root cause. A rank that has left no file failed
when torchrun saw that it had ended. Source: torch/distributed/elastic/multiprocessing/errors/__init__.py
"""

from __future__ import annotations

import contextlib
import json
import os
import time

from playground.runtime.errors import PeerDisconnected, PlaygroundError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


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


def await_reaped(pid: int, seconds: float) -> None:
    """Wait until torchrun has seen that its process `pid` has ended, `seconds` at most.

    Its processes end one by one, and the first that it sees ended is the first that it reports.
    """
    end = time.monotonic() + seconds
    while ERROR_FILE in os.environ and os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.01)
