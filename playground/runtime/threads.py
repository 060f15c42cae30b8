"""Threads of ours in a rank: each watches or waits, and neither calls an operation nor releases
one. Whether a thread is harmless is told by its class alone: any other may call operations,
whatever its name.
"""

from __future__ import annotations

import threading


class OurThread(threading.Thread):
    """A thread that the proof of a deadlock leaves aside."""


class OurTimer(OurThread, threading.Timer):
    """The same, after a time."""
