"""Semaphores in memory that processes share, by the C library. Source: sem_overview(7)"""

from __future__ import annotations

import ctypes
import time


class Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Semaphores:
    """The C library's functions. Raises `OSError` where it does not have them."""

    def __init__(self) -> None:
        quick, slow = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        try:  # what cannot wait keeps the interpreter's lock: to give it away would take longer
            self.post = quick.sem_post
            """Called with an address: adds a signal. The C function itself, for speed."""
            self.try_wait = quick.sem_trywait
            """Called with an address: takes a signal and returns 0, or another number if there is
            none. The C function itself."""
            self.sem_init = quick.sem_init
            self.sem_getvalue = quick.sem_getvalue
            self.sem_clockwait = slow.sem_clockwait
        except AttributeError as error:
            raise OSError(f"the C library has no such function: {error}") from None
        self.post.argtypes = self.try_wait.argtypes = [ctypes.c_void_p]
        self.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        self.sem_getvalue.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
        self.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Timespec)]

    def make(self, address: int) -> None:
        """Make a semaphore that is shared between processes, at this address. Raises `OSError`."""
        if self.sem_init(address, 1, 0):
            raise OSError(ctypes.get_errno(), "sem_init")

    def value(self, address: int) -> int:
        """Signals that are there to be waited for."""
        self.sem_getvalue(address, ctypes.byref(value := ctypes.c_int()))
        return value.value

    def wait(self, address: int, seconds: float) -> bool:
        """Sleep until there is a signal, `seconds` at most. Returns whether one came."""
        end = time.monotonic() + seconds
        limit = Timespec(int(end), int(end % 1 * 1e9))
        return self.sem_clockwait(address, time.CLOCK_MONOTONIC, ctypes.byref(limit)) == 0
