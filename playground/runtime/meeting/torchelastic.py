"""Tell torchrun of a rank's failure, in a file that it reads then; end ranks whose torchrun is killed.

torchrun calls the failure with the earliest time, in whole seconds, the root cause. A rank that has left no file failed
when torchrun saw that it had ended. Source: torch/distributed/elastic/multiprocessing/errors/__init__.py
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time

from playground.runtime.errors import PeerDisconnected, PlaygroundError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
RUN_ID = "TORCHELASTIC_RUN_ID"
PR_SET_PDEATHSIG = 1


def end_with_torchrun() -> None:
    """From now on, if torchrun has started this process, the kernel kills it when that one ends. torchrun ends its
    ranks first, unless it is killed. Source: prctl(2)"""
    if RUN_ID in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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
