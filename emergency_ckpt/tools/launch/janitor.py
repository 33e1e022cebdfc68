"""A program that ends the processes of a life when their supervisor has ended.

It runs as a script in its own session, with a pipe from the supervisor as standard input. Each host
process writes ``+<pgid>`` into that pipe before it becomes the user's command; the supervisor
writes ``-<pgid>`` once that process and its group have ended. When the pipe closes, also by SIGKILL
of the supervisor, every group still listed gets SIGKILL.

PR_SET_PDEATHSIG would reach only the direct child, and it fires when the *thread* that started the
child ends.
"""

from __future__ import annotations

import os
import signal
import sys

_READ_BYTES = 4096


def follow(descriptor: int) -> set[int]:
    """Read registrations until the pipe closes; return the groups that are still listed."""
    groups: set[int] = set()
    unread = b""
    while data := os.read(descriptor, _READ_BYTES):
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            change, group = line[:1], int(line[1:])
            (groups.add if change == b"+" else groups.discard)(group)
    return groups


def main() -> int:
    """Wait for the supervisor's end, then kill the remaining groups."""
    for group in follow(sys.stdin.fileno()):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has already ended
    return 0


if __name__ == "__main__":
    sys.exit(main())
