"""Starts two ranks of a world, as torchrun does, and ends some time later: `python -m agent SECONDS MODULE [WORD…]`."""

from __future__ import annotations

import os
import runpy
import sys
import time

if __name__ == "__main__":
    seconds, module, *words = sys.argv[1:]
    for rank in "01":
        if os.fork() == 0:
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
            sys.argv = [module, *words]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    time.sleep(float(seconds))
    os._exit(1)
