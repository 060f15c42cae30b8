"""Filters of the kernel's for what arrives at a socket. (Linux only.)

Source: Documentation/networking/filter.rst
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
Filter = tuple[tuple[int, int, int, int], ...]
"""Instructions: operation, jumps, operand."""
NOTHING: Filter = ((0x06, 0, 0, 0),)
"""Keep 0 bytes of every packet."""
NO_DATA: Filter = (
    # X: bytes of TCP's header; keep what has no more
    (0x30, 0, 0, 12), (0x54, 0, 0, 0xF0), (0x74, 0, 0, 2), (0x07, 0, 0, 0),
    (0x80, 0, 0, 0), (0x1D, 0, 1, 0), (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0),
)  # fmt: skip
"""Keep what makes a connection and ends it. Those that are accepted there have this filter too,
until it is taken off: then the other end sends what was dropped again."""


def put_filter(each: socket.socket, instructions: Filter) -> None:
    """Have the kernel drop what arrives there, or part of it. (To close a socket where gloo listens
    would be an error to the thread that polls it.)"""
    program = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *one) for one in instructions)
    )
    described = struct.pack("HP", len(instructions), ctypes.addressof(program))
    each.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)


def has_filter(each: socket.socket) -> bool:
    """Whether it has one. (The kernel takes the size for a number of instructions, of 8 bytes
    each.)"""
    return bool(each.getsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, 8 * len(NO_DATA)))


def remove_filter(each: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has none
        each.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
