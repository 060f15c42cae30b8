"""python -m playground

`python -m` looks into the working folder before anything else. So a `queue.py`, `random.py` or
`torch.py` of the user's own, in whatever folder they happen to work, would replace the module of
that name that the standard library, torch or we ask for, and would be run. The command line imports
nothing of theirs: for it, that folder comes last. (A script that calls `launch` is different:
Python puts its folder first for the sake of what the script imports.)
"""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def put_working_folder_last() -> None:
    """Move the folder that `python -m playground` put first on `sys.path` to its end. If it is a
    clone of the playground, and another copy is installed, then just before that one: the ranks are
    to import what runs here. Does nothing where Python was told to leave that folder out (-P,
    -I)."""
    if getattr(sys.flags, "safe_path", bool(sys.flags.isolated)):
        return
    folder = sys.path.pop(0)
    copies = [
        place
        for place, entry in enumerate(sys.path)
        if os.path.isdir(os.path.join(entry, "playground"))
    ]
    is_clone = os.path.realpath(folder) == ROOT
    sys.path.insert(copies[0] if is_clone and copies else len(sys.path), folder)


def main() -> None:
    """Run the command line, or say in one line what works where ranks cannot be started: nothing
    else of ours can be imported there."""
    from playground.base.process_checks import find_obstacle

    if obstacle := find_obstacle():
        print(f"playground: {obstacle}", file=sys.stderr)
        sys.exit(2)
    from playground.base import signals

    signals.handle_termination()  # Ctrl-C during the imports is a line, too
    from playground import app

    app.main()


if __name__ == "__main__":
    put_working_folder_last()  # before anything else is imported
    main()
