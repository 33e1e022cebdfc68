"""A tiny program that ends the processes of a life when their supervisor is gone.

Run as a script, in a session of its own, with a pipe from the supervisor as standard input. Each
host process writes ``+<pgid>`` into that pipe before it becomes the user's command; the supervisor
writes ``-<pgid>`` once that process and its group are gone. When the pipe closes, however the
supervisor ended (SIGKILL too), every group still listed gets SIGKILL.

PR_SET_PDEATHSIG is not used: it reaches only the direct child, and it fires when the *thread* that
started the child ends.
"""

from __future__ import annotations

import os
import signal
import sys

_READ_BYTES = 4096


def follow(descriptor: int) -> set[int]:
    """Read registrations until the pipe closes; the groups that are still listed then."""
    groups: set[int] = set()
    unread = b""
    while data := os.read(descriptor, _READ_BYTES):
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            change, group = line[:1], int(line[1:])
            (groups.add if change == b"+" else groups.discard)(group)
    return groups


def main() -> int:
    """Wait for the supervisor's end, then kill what is left."""
    for group in follow(sys.stdin.fileno()):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended by itself
    return 0


if __name__ == "__main__":
    sys.exit(main())
