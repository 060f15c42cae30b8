"""Run a command where there seem to be GPUs:

    python -m playground.world.simulated_gpu 2 python train.py

Where they cannot be built, for want of a compiler or of a PyTorch with CUDA, it says so, and the
command is run all the same and finds no GPU.
"""

from __future__ import annotations

import os
import sys

from playground.base.errors import UsageError
from playground.world.simulated_gpu.build import CannotBeBuilt
from playground.world.simulated_gpu.environment import environment_with


def main() -> None:
    gpus, command = sys.argv[1], sys.argv[2:]
    environ = dict(os.environ)
    try:
        environ = environment_with(int(gpus))
    except CannotBeBuilt as error:
        print(f"no simulated GPU: {error}", file=sys.stderr)
    except UsageError as error:
        sys.exit(f"no simulated GPU: {error}")
    os.execvpe(command[0], command, environ)


if __name__ == "__main__":
    main()
