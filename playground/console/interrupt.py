"""Ctrl-C while `python -m playground` is still importing: one line and exit code 130, and not where Python stood."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from playground.console.search_path import is_our_command


def leave_quietly_on_ctrl_c() -> None:
    """Until the command line takes over (`app.Commands`). Does nothing in any other program, nor where Ctrl-C is
    ignored."""
    installed = os.path.basename(sys.argv[0]) == "playground" if sys.argv else False
    if (installed or is_our_command()) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)


def leave_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """There is nothing to clean up yet."""
    os.write(2, b"playground: interrupted\n")
    os._exit(128 + number)
