"""A rank as its launcher sees it: how its process has ended."""

from __future__ import annotations

import signal

from playground.world.backends import BACKENDS
from playground.world.launcher.rank_handle import describe_exit

NCCL = BACKENDS["nccl"]


def test_an_aborted_rank_is_explained_where_the_backend_aborts() -> None:
    assert describe_exit(-signal.SIGABRT, BACKENDS["gloo"]) == "was killed by SIGABRT"
    assert describe_exit(-signal.SIGKILL, NCCL) == "was killed by SIGKILL"
    assert describe_exit(-signal.SIGABRT, NCCL).startswith(
        "was ended by NCCL's watchdog (SIGABRT): an operation"
    )
