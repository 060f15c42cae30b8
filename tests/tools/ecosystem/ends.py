import argparse
import atexit
import logging
import os
import signal
import sys
import threading
import weakref

from torch.distributed.elastic.multiprocessing.errors import record


class Kept:
    pass


def leave_word(name):
    with open(f"{name}{os.environ['RANK']}", "w") as file:
        file.write(name)


@record
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    logging.basicConfig(filename=f"log{os.environ['RANK']}", level=logging.INFO)
    logging.info("begun")
    signal.signal(signal.SIGUSR1, lambda *_: leave_word("signalled"))
    os.kill(os.getpid(), signal.SIGUSR1)
    atexit.register(leave_word, "atexit")
    weakref.finalize(kept := Kept(), leave_word, "finalized")
    threading.Timer(0.2, leave_word, ["thread"]).start()
    left_open = open(f"open{os.environ['RANK']}", "w")  # noqa: SIM115
    left_open.write("never closed")
    sys.modules["kept"] = kept, left_open
    print(f"{given.lr} {given.words} {sys.argv}\n", end="", flush=True)
    sys.exit()


if __name__ == "__main__":
    main()
