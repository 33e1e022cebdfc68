"""Ends as it is told to, or not at all; imports nothing."""

from __future__ import annotations

import os
import signal
import sys
import time


def end(how: str) -> None:
    print("at its end", flush=True)
    if how == "raise":
        raise ValueError("of the program")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))


def sleep() -> None:
    print(os.getpid(), flush=True)
    time.sleep(600)


def interpreter() -> None:
    print(hash("a text") if "PYTHONHASHSEED" in os.environ else "any hash", sys.path)


if __name__ == "__main__":
    programs = {each.__name__: each for each in (end, sleep, interpreter)}
    programs[sys.argv[1]](*sys.argv[2:])
