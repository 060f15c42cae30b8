"""The start of the fork server. The launcher's child forks it, tells the launcher its process id,
and ends.

The launcher knows the server before that has run a line of its own: it can say that somebody has
stopped it, and end it. This imports little, as the server waits for it.
"""

from __future__ import annotations

import os
import socket
import struct

MESSAGE = struct.Struct("q")
"""A process id, or an exit code."""


def fork_server() -> None:
    """Return in the server. The process that has called this sends the server's process id, and a
    pidfd of it, to the socket that is its standard input, and ends."""
    if pid := os.fork():
        try:
            with socket.socket(fileno=os.dup(0)) as launcher:
                socket.send_fds(launcher, [MESSAGE.pack(pid)], [os.pidfd_open(pid)])
        finally:
            os._exit(0)
