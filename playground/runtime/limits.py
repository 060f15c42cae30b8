"""Limits the system sets for a process, seen before a world meets them in the middle of something."""

from __future__ import annotations

from playground.runtime.errors import UsageError

FILES, FILES_PER_RANK = 24, 5
"""What a launcher has open, and a rank in two process groups, measured: at most 13 + 5 * size and 25 + 3 * size."""


def check_open_files(size: int) -> None:
    """Raise `UsageError` if a world of `size` ranks needs more open files than a process may have."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_PER_RANK * size
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"a world of {size} ranks needs {needed} open files, and the limit here is {limit}: "
            f"raise it (ulimit -n {needed}) or take fewer ranks"
        )
