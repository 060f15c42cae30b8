"""PyTorch's own tests of torch.distributed, each on 4 ranks of `launch`: `python torch_tests.py
[NAME…]` prints a JSON document, `{name: outcome}`. They come with torch and need the
package expecttest."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from playground import launch
from playground.base.errors import PlaygroundError
from playground.world.launcher.fork_client import preload

MODULE = "torch.testing._internal.distributed.distributed_test"
SIZE = 4
TIMEOUT, HANGS = 60.0, 120.0
"""Seconds for an operation of a group, and for a test."""


def run_test(rank: int, size: int, name: str, folder: str) -> str:
    """Run this test as `TestDistBackend._run` does; return its outcome on this rank."""
    os.environ["TEMP_DIR"] = folder
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed import distributed_test as theirs

    class TestDistBackendWithSpawn(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        pass

    test = TestDistBackendWithSpawn(name)
    test.rank, test.file_name = rank, os.path.join(folder, "store")
    timeout = timedelta(seconds=min(TIMEOUT, theirs.CUSTOM_PG_TIMEOUT.get(name, TIMEOUT)))
    dist.init_process_group(
        "gloo", init_method=test.init_method, rank=rank, world_size=size, timeout=timeout
    )
    test._barrier()
    common_utils.set_rng_seed()
    try:
        getattr(test, name)()
    except (unittest.SkipTest, SystemExit) as reason:  # an exit code says why it is skipped
        return f"skipped: {reason}"
    test._barrier()
    dist.destroy_process_group()
    return "passed"


def find_outcome(name: str) -> str:
    """Run this test in a world of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("barrier", "test_dir", "init_dir"):
            Path(folder, part).mkdir()
        try:
            outcomes = launch(
                run_test,
                SIZE,
                args=(name, folder),
                timeout=HANGS,
                fresh=True,
            )
        except PlaygroundError as error:
            return str(error)
        return ", ".join(sorted(set(outcomes)))


def main(*names: str) -> None:
    # The tests ask at their import.
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(SIZE), "TEMP_DIR": tempfile.gettempdir()}
    preload(MODULE)
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    found = names or [
        name for name in dir(DistributedTest._DistTestBase) if name.startswith("test_")
    ]
    print(json.dumps({name: find_outcome(name) for name in found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
